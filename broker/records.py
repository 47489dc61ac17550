"""What the broker hands out: leases, deliveries, the ledger, members. Frozen, and free of any Redis type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.trajectory import Group, Prompt

Role = Literal["generator", "learner", "broker"]
MemberState = Literal["joining", "syncing", "serving", "draining"]
FilteredKind = Literal["correct", "wrong", "equal"]


@dataclass(frozen=True)
class Lease:
    """A prompt held by one generator. `entry_id` is the fencing token: after a reclaim it names nothing any more."""

    entry_id: str
    prompt: Prompt


@dataclass(frozen=True)
class Delivery:
    """A group held by the learner."""

    entry_id: str
    group: Group


@dataclass(frozen=True)
class Ledger:
    """What happened to every released prompt. All but `outstanding` are counters; `outstanding` is measured from the
    streams at the same instant, so the equation is a real check:

        released = trained + filtered_correct + filtered_wrong + filtered_equal + expired + dead + outstanding

    `submitted`, `settled` (the part of `trained` that is durable) and `duplicates` (late results of leases that were
    taken over) are not terms of it.
    """

    released: int = 0
    submitted: int = 0
    filtered_correct: int = 0
    filtered_wrong: int = 0
    filtered_equal: int = 0
    trained: int = 0
    settled: int = 0
    expired: int = 0
    dead: int = 0
    duplicates: int = 0
    outstanding: int = 0

    @property
    def filtered(self) -> int:
        return self.filtered_correct + self.filtered_wrong + self.filtered_equal

    @property
    def accounted(self) -> int:
        """The right-hand side of the equation."""
        return self.trained + self.filtered + self.expired + self.dead + self.outstanding

    @property
    def balanced(self) -> bool:
        return self.released == self.accounted


@dataclass(frozen=True)
class Queues:
    """How many entries wait and how many somebody holds; `unsettled` groups are trained but not yet durable."""

    prompts_waiting: int
    prompts_leased: int
    groups_waiting: int
    groups_held: int
    unsettled: int
    dead_letters: int


@dataclass(frozen=True)
class DeadLetter:
    """A prompt or group that was given up. `group_id` is empty where even that could not be read."""

    group_id: str
    error: str


@dataclass(frozen=True)
class Member:
    """A process of the fleet as its last heartbeat described it; `age_s` is how long ago, by the server's clock."""

    id: str
    role: Role
    state: MemberState
    version: int = 0
    epoch: int = 0
    host: str = ""
    pid: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    age_s: float = 0.0
