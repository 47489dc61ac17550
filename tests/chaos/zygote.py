"""`python -m tests.chaos.zygote`: imports everything once and forks the processes of a chaos run from itself.

Real processes with their own connections, threads and deaths, that start in milliseconds instead of seconds: hundreds
of kills fit into minutes. torch is replaced by its name only; nothing in a chaos run computes with it.

Standard input takes `{"name", "role", "log", "spec"}`, a line each; standard output answers `{"name", "pid"}` and says
`{"pid", "code"}` of every process that ended (negative: the signal). No process outlives the zygote, nor it its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_START_S = 120.0


@dataclass(frozen=True)
class Exit:
    pid: int
    code: int


class Zygote:
    """The harness's end. `prefix` goes before the command (`ip netns exec ...`)."""

    def __init__(self, log: Path, prefix: Sequence[str] = ()) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.chaos.zygote"],
                cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._exits: deque[Exit] = deque()
        self._read(_START_S)  # "ready"

    def spawn(self, name: str, role: str, log: Path, spec: dict[str, Any]) -> int:
        """Start a process; returns its pid."""
        line = json.dumps({"name": name, "role": role, "log": str(log), "spec": spec}) + "\n"
        self._in.write(line.encode())
        self._in.flush()
        while "name" not in (message := self._read(_START_S)):
            self._exits.append(Exit(message["pid"], message["code"]))
        return int(message["pid"])

    def exits(self) -> list[Exit]:
        """Processes that have ended since the last call."""
        while message := self._read(0.0):
            self._exits.append(Exit(message["pid"], message["code"]))
        found = list(self._exits)
        self._exits.clear()
        return found

    def fileno(self) -> int:
        return self._out.fileno()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._process.wait()
        self._out.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next message; empty where none came in time."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return {}
                if not (data := os.read(self._out.fileno(), 65536)):
                    raise RuntimeError("the zygote ended; its log says why")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))


def exits(zygotes: Iterable[Zygote], timeout_s: float) -> list[Exit]:
    """Processes of any of them that ended; waits for the first one at most `timeout_s`."""
    zygotes = list(zygotes)
    found = [each for zygote in zygotes for each in zygote.exits()]
    if not found:
        select.select(zygotes, [], [], timeout_s)
        found = [each for zygote in zygotes for each in zygote.exits()]
    return found


def _without_torch() -> None:
    torch, distributed = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    for name in ("float32", "bfloat16", "float16"):
        setattr(torch, name, name)
    torch.distributed = distributed  # type: ignore[attr-defined]
    sys.modules.update({"torch": torch, "torch.distributed": distributed})


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    _die_with_parent()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    from tests.chaos import players

    code = players.run(order["role"], order["name"], order["spec"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    _die_with_parent()
    _without_torch()
    from tests.chaos import players

    assert players
    gc.freeze()
    _say({"ready": True})
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    buffer = b""
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                if not (data := os.read(0, 65536)):
                    return  # the children go with us
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    pid = _fork(order)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    _say({"name": order["name"], "pid": pid})
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _say({"pid": key.data, "code": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
