"""`python -m broker.guard TOKEN`: ends a fleet whose launcher died without doing so itself.

The launcher holds the other end of this process's standard input and writes `+PID` for every member it starts and
`-PID` for every one that is gone. A last line `done` means that it has cleaned up; the end of the input without it
means that it was killed.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys

from broker.processes import await_end, family, kill_family, mark, send

SERVER = "server"  # name of the Redis server among the members: the last to go
GRACE_S = 5.0


class Guard:
    """The launcher's end."""

    def __init__(self, token: str) -> None:
        # A session of its own: what kills the launcher's process group must not kill its guard.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "broker.guard", token],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def add(self, pid: int) -> None:
        self._write(f"+{pid}")

    def remove(self, pid: int) -> None:
        self._write(f"-{pid}")

    def close(self) -> None:
        self._write("done")
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the fleet goes on without
            self._pipe.write(line + "\n")
            self._pipe.flush()


def main(token: str) -> None:
    leaders: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        (leaders.add if word[0] == "+" else leaders.discard)(int(word[1:]))
    server = family(mark(token, SERVER), [])
    members = family(mark(token), leaders) - server
    send(members & leaders, signal.SIGTERM)
    await_end(members, GRACE_S)
    send(family(mark(token), leaders) - server, signal.SIGKILL)
    send(server, signal.SIGTERM)
    await_end(server, GRACE_S)
    kill_family(mark(token), leaders)


if __name__ == "__main__":
    main(sys.argv[1])
