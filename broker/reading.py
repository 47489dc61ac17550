"""A run at one moment, as the broker service reads it once a heartbeat: for `/metrics`, the page and the autoscaler."""

from __future__ import annotations

import time
from dataclasses import dataclass

from broker.records import Ledger, Member, Queues, Unfinished
from broker.store import Broker


@dataclass(frozen=True)
class Reading:
    """`at` is when, in monotonic seconds; the memory figures are in bytes, a limit of 0 is none."""

    at: float
    version: int
    ledger: Ledger
    queues: Queues
    members: tuple[Member, ...]
    unfinished: Unfinished
    queue_bytes: int
    memory: int
    memory_limit: int

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
    )
