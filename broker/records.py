"""What the broker hands out: leases, deliveries, the ledger, members. Frozen, and free of any Redis type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.trajectory import Group, PartialGroup, Prompt

Role = Literal["generator", "learner", "broker"]
MemberState = Literal["joining", "syncing", "serving", "draining"]
FilteredKind = Literal["correct", "wrong", "equal"]


@dataclass(frozen=True)
class Lease:
    """A prompt held by one generator. `entry_id` is the fencing token: after a reclaim it names nothing any more.
    `partial` is what earlier holders have sampled, where they left any of it. `entry` goes along with the group: when
    the prompt was first released (ms, as the server wrote it), and the prompt's bytes."""

    entry_id: str
    prompt: Prompt
    partial: PartialGroup | None = None
    entry: tuple[bytes, bytes] = (b"", b"")


@dataclass(frozen=True)
class Delivery:
    """A group held by the learner."""

    entry_id: str
    group: Group


@dataclass(frozen=True)
class Ledger:
    """What happened to every release of a prompt. All but `outstanding` are counters; that is measured from the streams
    at the same instant, so the equation is a real check:

        released = trained + filtered_correct + filtered_wrong + filtered_equal + expired + dead + outstanding

    A prompt whose group expired is released again: each release ends in exactly one way, and `rereleased` is the part
    of `released` that was a prompt's second or later one. A dead letter that is put back is outstanding and not dead
    any more. `submitted`, `settled` (the part of `trained` that left Redis) and `duplicates` (late results of leases
    that were taken over) are not terms of the equation.
    """

    released: int = 0
    rereleased: int = 0
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
    """A prompt or group that was given up.

    Attributes:
        entry_id: its entry in the stream of dead letters.
        group_id: empty where even that could not be read.
        kind: `data`: its sampling or its reward failed `max_attempts` times; `damaged`: a released prompt or its group
            that cannot be read; `foreign`: bytes that no release of this run produced, which the ledger does not count.
        error: the last one, in full.
        generator: whose lease or group it was; empty where nobody can tell.
        attempts: releases of the prompt that failed, this one included; 0 where the prompt cannot be read.
        age_s: seconds since it was given up, by the server's clock.
        prompt: what is sampled again when it is retried; None where it cannot be.
    """

    entry_id: str
    group_id: str
    kind: str
    error: str
    generator: str
    attempts: int
    age_s: float
    prompt: Prompt | None

    @property
    def last_line(self) -> str:
        """Of the error: of a traceback, what went wrong. Empty where there is none."""
        return (self.error.strip().splitlines() or [""])[-1]

    @property
    def id(self) -> str:
        """What names it on the command line: the group's id, else the entry's."""
        return self.group_id or self.entry_id


@dataclass(frozen=True)
class Whereabouts:
    """Where a group is: `place` in words, `age_s` seconds after its (last) release."""

    group_id: str
    place: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.group_id}, {self.age_s:.1f} s old: {self.place}"


@dataclass(frozen=True)
class Unfinished:
    """The oldest group that is outstanding and the oldest that is trained but not settled, by the version of their
    release; and how often each group that has not ended expired before."""

    outstanding: Whereabouts | None
    unsettled: Whereabouts | None
    expiries: dict[str, int]


@dataclass(frozen=True)
class EvalLease:
    """A prompt of the evaluation round that began at policy `version`, held by one generator."""

    entry_id: str
    version: int
    index: int
    prompt: Prompt


@dataclass(frozen=True)
class EvalRound:
    """The open evaluation round: `answered` of `prompts`, `seconds` after its beginning."""

    version: int
    prompts: int
    answered: int
    seconds: float

    @property
    def complete(self) -> bool:
        return self.answered >= self.prompts

    def __str__(self) -> str:
        return f"evaluation at version {self.version}: {self.answered} of {self.prompts} prompts answered"


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation round measured.

    `accuracy` is the mean over prompts of the share of correct answers (avg@samples); None where the reward tells no
    answer right from wrong. `standard_error` is that of it, else of `reward_mean`, over prompts. Answers the reward
    failed on are not correct, and counted in `not_scored`; `reward_mean` (None: there is none) is over the others.
    """

    version: int
    accuracy: float | None
    standard_error: float
    reward_mean: float | None
    response_length_mean: float
    truncated_share: float
    oldest_version: int
    newest_version: int
    prompts: int
    samples: int
    not_scored: int
    seconds: float

    def __str__(self) -> str:
        name, value = ("accuracy", self.accuracy) if self.accuracy is not None else ("reward", self.reward_mean)
        measured = "nothing scored" if value is None else f"{name} {value:.3f} +- {self.standard_error:.3f}"
        versions = f"{self.oldest_version}-{self.newest_version}".removeprefix(f"{self.newest_version}-")
        failures = f", {self.not_scored} not scored" if self.not_scored else ""
        return (
            f"evaluation at version {self.version}: {measured} ({self.prompts} prompts x {self.samples}, answered by "
            f"version{'' if versions.isdigit() else 's'} {versions}{failures}, {self.seconds:.1f} s)"
        )


@dataclass(frozen=True)
class EvalState:
    """Where evaluation is: the open round, the version of the round last begun or skipped, the last result."""

    open: EvalRound | None = None
    last: int | None = None
    result: EvalResult | None = None


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

    @property
    def incarnation(self) -> str:
        """The process, as long as it lives: one that is started again under the same id is another."""
        return f"{self.pid}@{self.host}"
