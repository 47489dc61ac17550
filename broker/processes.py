"""Processes of a local fleet: starting, waiting for and ending them, whole families at a time.

A member's family is what carries its mark in its environment, what runs in its session, and what descends from either:
vLLM's workers rewrite their environment, torchrun's open sessions of their own, and orphans have lost their parent, but
nothing is all three. Linux only (`/proc`, pidfd).
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.config import Config

MARK = "HEADRACE_MEMBER"  # environment variable; see `mark`


def mark(token: str, name: str = "") -> str:
    """The mark of one member of the fleet `token`; without a name, what the marks of all of them start with."""
    return f"{token}/{name}/" if name else f"{token}/"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int


def _running() -> dict[int, _Process]:
    """Every process of this machine that is not a zombie, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The command, in parentheses, may hold spaces and parentheses: the fields start after the last one.
            state, parent, _group, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                found[int(name)] = _Process(int(name), int(parent), int(session))
    return found


def _has_mark(pid: int, prefix: bytes) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    return any(entry.startswith(prefix) for entry in environ.split(b"\0"))


def family(marked: str, sessions: Iterable[int]) -> set[int]:
    """Pids of all living processes whose mark starts with `marked`, in one of `sessions`, or descending from either."""
    processes, sessions = _running(), set(sessions)
    prefix = f"{MARK}={marked}".encode()
    found = {p.pid for p in processes.values() if p.session in sessions or _has_mark(p.pid, prefix)}
    while more := {p.pid for p in processes.values() if p.parent in found} - found:
        found |= more
    return found - {os.getpid()}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def await_end(pids: Iterable[int], timeout_s: float) -> bool:
    """Wait until all have ended. They need not be children of this process. False: the time was up."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(descriptor)
    return True


def kill_family(marked: str, sessions: Iterable[int]) -> None:
    """SIGKILL a family until nothing of it is left (it may fork meanwhile)."""
    sessions = list(sessions)
    for _ in range(10):
        if not (pids := family(marked, sessions)):
            return
        send(pids, signal.SIGKILL)
        await_end(pids, 2.0)


@dataclass(frozen=True)
class Command:
    """What to start as a member: `name` is its log's name, `environ` is added to the environment."""

    name: str
    role: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


METRICS_VARIABLE = "HEADRACE__METRICS__PORT"
PAGE_VARIABLE = "HEADRACE__PAGE__PORT"


def metrics_port(config: Config, number: int) -> dict[str, str]:
    """Environment of the member of that number on this machine: a port of its own for its metrics, if any are shown."""
    return {} if config.metrics.port is None else {METRICS_VARIABLE: str(config.metrics.port + number)}


def page_port(config: Config) -> dict[str, str]:
    """Environment of the broker service: a free port for its page, where none is configured."""
    return {} if config.page.port is not None else {PAGE_VARIABLE: "0"}


class Child:
    """A member's process, leader of a session of its own, its output appended to `<logs>/<name>.log`."""

    def __init__(self, command: Command, token: str, logs: Path) -> None:
        self.name, self.role = command.name, command.role
        self.log = logs / f"{command.name}.log"
        self._mark = mark(token, command.name)
        # Already in the configuration the member is given; there, options given by hand win over these.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE__")}
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **command.environ, MARK: self._mark},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.gone = False  # with its family; its pid and session may belong to someone else by now

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the leader to end; it knows in which order its family has to go."""
        if self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its whole family at once."""
        if not self.gone:
            kill_family(self._mark, [self.pid])
            self._process.wait()
            self.gone = True

    def output(self, limit: int = 256 * 1024) -> str:
        """The end of what this start of it has written."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - limit))
            return file.read().decode("utf-8", errors="replace")


class Waiter:
    """Sleeps until a watched process ends, a signal comes in, or the time is up. For the main thread.

    As a context manager it counts SIGINT, SIGTERM and SIGHUP in `signals` instead of letting them end the process.
    """

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self._selector = selectors.DefaultSelector()
        self._waking, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._waking, selectors.EVENT_READ)

    def __enter__(self) -> Waiter:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
        self._waking.close()
        self._waker.close()

    def _note(self, number: int, _frame: object) -> None:
        self.signals.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b".")

    def watch(self, pid: int) -> None:
        """Let `wait` return when this process ends (once)."""
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.fileobj is self._waking:
                self._waking.recv(64)
            else:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
