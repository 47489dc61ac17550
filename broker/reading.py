"""A run at one moment: for `/metrics` and the autoscaler, for `headrace up` and `headrace top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from broker.records import EvalResult, Ledger, Member, Queues, Unfinished
from broker.store import Broker
from common.errors import HeadraceError

REFRESH_S = 1.0


@dataclass(frozen=True)
class Reading:
    """`at` is when, in monotonic seconds; the memory figures are in bytes, a limit of 0 is none. `evaluation` is the
    last one's result, `wished_ranks` what `headrace resize` asked for."""

    at: float
    version: int
    ledger: Ledger
    queues: Queues
    members: tuple[Member, ...]
    unfinished: Unfinished
    queue_bytes: int
    memory: int
    memory_limit: int
    evaluation: EvalResult | None = None
    wished_ranks: int | None = None

    def in_role(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]


def read(broker: Broker) -> Reading:
    """Raises HeadraceError as every method of `Broker`."""
    memory, limit = broker.server_memory()
    return Reading(
        at=time.monotonic(),
        version=broker.version(),
        ledger=broker.ledger(),
        queues=broker.queues(),
        members=tuple(broker.members()),
        unfinished=broker.unfinished(),
        queue_bytes=broker.group_bytes(),
        memory=memory,
        memory_limit=limit,
        evaluation=broker.evaluation().result,
        wished_ranks=broker.wished_ranks(),
    )


@dataclass(frozen=True)
class Speed:
    """Tokens a second that a process sampled between its last two heartbeats, None before the second one; and what the
    later one counted."""

    tokens: float
    wall_s: float
    per_s: float | None = None


def speeds(before: Mapping[str, Speed], reading: Reading) -> dict[str, Speed]:
    """Of every generator's process (`Member.incarnation`), given those at the reading before."""
    return {m.incarnation: _speed(before.get(m.incarnation), m) for m in reading.in_role("generator")}


def _speed(before: Speed | None, member: Member) -> Speed:
    tokens, wall_s = (member.counters.get(name, 0.0) for name in ("tokens", "wall_s"))
    if before is None:
        return Speed(tokens, wall_s)
    if wall_s <= before.wall_s:  # no heartbeat since
        return before
    return Speed(tokens, wall_s, (tokens - before.tokens) / (wall_s - before.wall_s))


class Observer:
    """Reads the run once a second in a thread of its own: an unreachable server must not stop who shows it.

    Args:
        connect: to the run's server; called in that thread, and the connection is closed with it.

    Attributes:
        latest: the last reading that could be made.
    """

    def __init__(self, connect: Callable[[], Broker]) -> None:
        self.latest: Reading | None = None
        self._connect = connect
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * REFRESH_S)

    def _run(self) -> None:
        broker: Broker | None = None
        while not self._stop.wait(REFRESH_S):
            with suppress(HeadraceError):  # shown as a display that stands still; the members say what is wrong
                broker = broker or self._connect()
                self.latest = read(broker)
        if broker is not None:
            broker.close()
