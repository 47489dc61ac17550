"""`headrace top`: a run on a terminal, every two seconds, with keys to drain a generator and to see dead letters.

What it promises: it is never stuck with the server. All calls are made by one thread; while that waits, the screen says
how old its numbers are, keys work, and once the server is back the numbers move again.
"""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker.progress import MetricsTail
from broker.reading import Reading, read, stations
from broker.records import DeadLetter, Member
from broker.store import Broker
from common.errors import HeadraceError

_REFRESH_S = 2.0  # a screen takes 12 ms of a processor, more than all else here
_SOON_S = 0.3  # after a key, when what it asked for has been read
_LATE_S = 5.0
_LETTERS = 100
_KEY = re.compile(r"\x1b[\[O][^A-Za-z~]*[A-Za-z~]|.", re.DOTALL)  # what an arrow sends, or a character
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down", "\x1b": "escape"}
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HELP = "up/down select   d drain   l dead letters   q quit"
_LETTERS_HELP = "up/down select   l back   q quit"
_STYLES = {"serving": "green", "draining": "yellow"}


@dataclass(frozen=True)
class _Speed:
    tokens: float
    wall_s: float
    per_s: float | None = None


@dataclass
class State:
    """What is on the screen. `speeds`: of a process its tokens a second between the last two heartbeats, and what the
    later one counted; `selected` is a generator, `letter` a dead letter; `drain` is the generator that the next `d`
    asks to leave; `error` why nothing is new."""

    reading: Reading | None = None
    speeds: dict[str, _Speed] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    letters: list[DeadLetter] = field(default_factory=list)
    shows_letters: bool = False
    selected: int = 0
    letter: int = 0
    drain: Member | None = None
    said: str = ""
    error: str = ""

    @property
    def generators(self) -> list[Member]:
        return self.reading.in_role("generator") if self.reading is not None else []


class Top:
    """The run behind the screen.

    Args:
        broker: of the run; used by one thread only.
        metrics: the run's `metrics.jsonl`, for what the learner alone knows; it need not be there.
    """

    def __init__(self, broker: Broker, metrics: Path) -> None:
        self.state = State()
        self._broker, self._tail = broker, MetricsTail(metrics, from_start=True)
        self._wanted: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="top", daemon=True)

    def run(self, console: Console, keys: Callable[[float], str]) -> None:
        """Show it until `keys`, which waits so many seconds for a key at most, says `q`."""
        self._thread.start()
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                key = ""
                while key != "q":
                    self._press(key)
                    live.update(screen(self.state, self._broker, console.height), refresh=True)
                    key = keys(_SOON_S if key else _REFRESH_S)
        finally:
            self._wanted.put(None)
            self._thread.join(_REFRESH_S)

    # --- the thread that speaks to the server

    def _work(self) -> None:
        while True:
            try:
                self._look()
                self.state.error = ""
            except HeadraceError as error:
                self.state.error = str(error)
            try:
                wanted = self._wanted.get(timeout=_REFRESH_S)
            except queue.Empty:
                continue
            if wanted is None:
                return
            wanted()

    def _look(self) -> None:
        state, reading = self.state, read(self._broker)
        state.speeds = {m.incarnation: _speed(state.speeds.get(m.incarnation), m) for m in reading.in_role("generator")}
        state.reading = reading
        state.letters = self._broker.dead_letters(_LETTERS) if state.shows_letters else []
        with suppress(OSError, ValueError):  # of the learner's file, which may be another machine's
            for record in self._tail.read():
                state.record = record

    def _drain(self, member: Member) -> None:
        try:
            self._broker.drain(member)
            self.state.said = f"{member.id} was asked to leave"
        except HeadraceError as error:
            self.state.said = str(error)

    # --- keys

    def _press(self, key: str) -> None:
        state = self.state
        if not key:
            return
        asked, state.drain, state.said, generators = state.drain, None, "", state.generators
        step = {"up": -1, "down": 1}.get(key, 0)
        if state.shows_letters:
            state.letter = max(0, min(state.letter + step, len(state.letters) - 1))
        else:
            state.selected = max(0, min(state.selected + step, len(generators) - 1))
        if key == "l" or (key == "escape" and state.shows_letters):
            state.shows_letters = not state.shows_letters
            self._wanted.put(lambda: None)  # reads anew
        elif key == "d" and generators and not state.shows_letters:
            chosen = generators[state.selected]
            if asked is not None and asked.incarnation == chosen.incarnation:
                state.said = f"asking {chosen.id} to leave"
                self._wanted.put(lambda: self._drain(chosen))
            else:
                state.drain = chosen
                state.said = f"d again: {chosen.id} takes no new prompts, hands over what it has, and ends"


def screen(state: State, broker: Broker, height: int) -> RenderableType:
    """All of it, for a terminal of so many lines."""
    reading, run = state.reading, broker.config.run.run_id
    if reading is None:
        return Group(Text(f"run {run}: {state.error or 'waiting for the server'}"), _foot(state))
    head = Text(f"run {run}   version {reading.version}", style="bold")
    if (age := time.monotonic() - reading.at) > _LATE_S:
        head.append(f"   no answer from the server; numbers are {age:.0f} s old", style="bold red")
    room = max(3, height - 11)
    body = _letters(state, room) if state.shows_letters else _members(state, room)
    groups = broker.config.learner.groups_per_step
    return Group(head, Text(), _stations(reading), _numbers(reading, state.record, groups), Text(), body, _foot(state))


def _stations(reading: Reading) -> Table:
    """A group's way, from left to right, and the ways it may end."""
    cells = {name.replace("_", " "): count for name, count in stations(reading).items() if name != "unsettled"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in cells:
        table.add_column(name, justify="right", header_style="dim")
    table.add_row(*map(str, cells.values()))
    return table


def _numbers(reading: Reading, record: dict[str, Any], groups_per_step: int) -> Text:
    serving = [member.version for member in reading.in_role("generator") if member.state == "serving"]
    limit = f" of {reading.memory_limit / 2**20:.0f}" if reading.memory_limit else ""
    age_s = reading.unfinished.outstanding.age_s if reading.unfinished.outstanding else 0.0
    queue = [
        f"lag {reading.queues.groups_waiting / groups_per_step:.1f} steps",
        f"oldest {age_s:.0f} s",
        f"behind {reading.version - min(serving, default=reading.version)} versions",
        f"memory {reading.memory / 2**20:.0f} MB{limit}",
    ]
    training = [f"dead letters {reading.queues.dead_letters}"]
    if record:
        training += [
            f"staleness {record['staleness_mean']:.2f} (max {record['staleness_max']:.0f})",
            f"reward {record['reward_mean']:.3f}",
            f"length {record['response_length_mean']:.0f}",
            f"entropy {record['entropy']:.3f}",
            f"effective sample {record['effective_sample_size']:.2f}",
        ]
    if not reading.ledger.balanced:
        training.append("ledger NOT BALANCED")
    return Text("\n".join("   ".join(parts) for parts in (queue, training)))


def _members(state: State, room: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "member", "role", "state"):
        table.add_column(name, header_style="dim")
    for name in ("version", "tokens/s", "in flight", "seen"):
        table.add_column(name, header_style="dim", justify="right")
    assert state.reading is not None
    generators = state.generators
    selected = min(state.selected, len(generators) - 1)  # one may have left since the key
    others = [member for member in state.reading.members if member.role != "generator"]
    first = max(0, min(selected - room // 2, len(generators) + len(others) - room))
    for index, member in list(enumerate([*generators, *others]))[first : first + room]:
        chosen = index == selected
        speed = state.speeds.get(member.incarnation)
        numbers = (speed.per_s if speed else None, member.counters.get("in_flight"))
        table.add_row(
            ">" if chosen else "", member.id, member.role, Text(member.state, _STYLES.get(member.state, "")),
            str(member.version), *("" if each is None else f"{each:.0f}" for each in numbers), f"{member.age_s:.1f} s",
            style="reverse" if chosen else "",
        )  # fmt: skip
    return table


def _speed(before: _Speed | None, member: Member) -> _Speed:
    tokens, wall_s = (member.counters.get(name, 0.0) for name in ("tokens", "wall_s"))
    if before is None:
        return _Speed(tokens, wall_s)
    if wall_s <= before.wall_s:  # no heartbeat since
        return before
    return _Speed(tokens, wall_s, (tokens - before.tokens) / (wall_s - before.wall_s))


def _letters(state: State, room: int) -> RenderableType:
    """The newest dead letters in the upper half, and below them the whole error of the selected one."""
    letters = state.letters
    if not letters:
        return Text("no dead letters")
    shown, selected = max(1, room // 2 - 2), min(state.letter, len(letters) - 1)
    first = max(0, min(selected - shown // 2, len(letters) - shown))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("dead letter", "kind", "attempts", "generator", "error"):
        table.add_column(name, header_style="dim", no_wrap=True, overflow="ellipsis")
    for index, each in list(enumerate(letters))[first : first + shown]:
        cells = (each.id, each.kind, str(each.attempts), each.generator, each.last_line)
        table.add_row(*map(Text, cells), style="reverse" if index == selected else "")
    last = letters[selected].error.strip().splitlines()[-max(1, room - shown - 2) :]
    return Group(table, Text(), Text("\n".join(last), style="dim", no_wrap=True, overflow="ellipsis"))


def _foot(state: State) -> Text:
    if state.error:
        return Text(f"\n{state.error}", style="red")
    keys = _LETTERS_HELP if state.shows_letters else _HELP
    return Text(f"\n{state.said or keys}", style="" if state.said else "dim")


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """The terminal's keys one by one and unechoed: a call waits for the next one, an empty string is none.

    A signal to end is a `q`: as an exception it could come where Python ignores one, and be lost.
    """
    number, (told, tell) = sys.stdin.fileno(), os.pipe()
    before = termios.tcgetattr(number)
    handlers = {each: signal.signal(each, lambda *_: os.write(tell, b"q")) for each in _ENDS}
    tty.setcbreak(number)

    typed: list[str] = []

    def key(timeout_s: float) -> str:
        if not typed:
            for ready in select.select([told, number], [], [], timeout_s)[0]:
                text = os.read(ready, 64).decode(errors="replace")
                typed.extend(_KEY.findall(text) or "q")  # the end of the input: nobody is there any more
        pressed = typed.pop(0) if typed else ""
        return _KEYS.get(pressed, pressed)

    try:
        yield key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        os.close(told)
        os.close(tell)
