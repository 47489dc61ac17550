"""A run at one moment: for `/metrics` and the autoscaler, for `headrace up` and `headrace top`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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


def stations(reading: Reading) -> dict[str, int]:
    """Groups at each station of a group's way, and how many ended in each way."""
    ledger, queues = reading.ledger, reading.queues
    return {
        "released": ledger.released, "waiting": queues.prompts_waiting, "in_flight": queues.prompts_leased,
        "queued": queues.groups_waiting, "learner": queues.groups_held, "unsettled": queues.unsettled,
        "trained": ledger.trained, "settled": ledger.settled, "filtered": ledger.filtered, "expired": ledger.expired,
        "dead": ledger.dead,
    }  # fmt: skip


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
