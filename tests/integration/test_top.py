"""`headrace top` on a real terminal, of a run whose server goes away and comes back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from broker_helpers import MakeConfig, group, lease, release
from valkey_helpers import DATA, node, until

from broker import Broker, Member

PATIENCE_S = 30.0
COMMAND = "from broker.cli_top import top; import typer; typer.run(top)"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program on a terminal of 120 columns and 30 lines."""

    def __init__(self, *argv: str) -> None:
        self.own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.before = termios.tcgetattr(other)
        environ = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(argv, stdin=other, stdout=other, stderr=other, env=environ, close_fds=True)
        self._other = other

    def press(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def shows(self, *texts: str) -> str:
        """What has been written since the last call, once all of these are in it."""
        seen, deadline = "", time.monotonic() + PATIENCE_S
        while not all(text in seen for text in texts):
            assert time.monotonic() < deadline, f"{texts} not in:\n{seen[-3000:]}"
            if select.select([self.own], [], [], 0.2)[0]:
                seen += _ESCAPE.sub("", os.read(self.own, 65536).decode(errors="replace"))
        return seen

    def ends(self) -> int:
        """Its exit code; it has left the terminal as it was."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self.own], [], [], 0.2)[0]:
                os.read(self.own, 65536)
        assert termios.tcgetattr(self._other) == self.before
        return self.process.returncode


@contextmanager
def terminal(*argv: str) -> Iterator[Terminal]:
    started = Terminal(*argv)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        os.close(started.own)
        os.close(started._other)


def test_top_shows_the_run_drains_and_outlives_its_server(make_config: MakeConfig, tmp_path: Path) -> None:
    with node(tmp_path / "server", *DATA) as server:
        config = make_config(broker={"url": server.url, "password_file": None, "member_ttl_s": 600, "max_attempts": 1})
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        broker = Broker.connect(config)
        release(broker, 7)
        first, second = lease(broker, 2)
        assert broker.submit("g1", first, group(first.prompt.group_id))
        broker.fail("g1", second.entry_id, second.prompt, "the judge\nValueError: no verdict")
        members = [
            Member(f"g{pid}", "generator", "serving", version=0, host="here", pid=pid, counters={"in_flight": 3.0})
            for pid in (1, 2)
        ]
        for member in members:
            broker.heartbeat(member)

        with terminal(sys.executable, "-c", COMMAND, str(file)) as top:
            page = top.shows("version 0", "dead letters 1", "g1", "g2", "q quit")
            row = re.search(r"settled.*?dead\s+([\d ]+)", page, re.DOTALL)
            assert row is not None and [int(each) for each in row[1].split()[:6]] == [7, 5, 0, 1, 0, 0]

            top.press("l")
            top.shows(second.prompt.group_id, "the judge", "ValueError: no verdict", "l back")
            top.press("l")
            top.shows("g2")

            top.press("\x1b[Bd")  # arrow down, and faster than it is drawn
            top.shows("d again: g2")
            assert not any(broker.heartbeat(member) for member in members), "asked once is not enough"
            top.press("d")
            top.shows("g2 was asked to leave")
            assert [broker.heartbeat(member) for member in members] == [False, True]

            server.kill()
            top.shows("no answer from the server")
            server.start()
            until(lambda: broker.ledger().released == 7)
            broker.heartbeat(Member("g3", "generator", "serving", version=0, host="here", pid=3))
            top.shows("g3")

            top.press("q")
            assert top.ends() == 0

        (config.run.folder / "metrics.jsonl").mkdir(parents=True)  # as unreadable as another user's file
        for number in (signal.SIGINT, signal.SIGTERM):
            with terminal(sys.executable, "-c", COMMAND, str(file)) as top:
                top.shows("g1")
                top.process.send_signal(number)
                assert top.ends() == 0
        broker.close()
