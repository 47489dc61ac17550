"""How many generators the learner needs, as a state machine: observe in, wish out, with the clock in the observation.

Generators are producers. A queue that grows says that there are too many of them, so scaling them by its length, as one
scales consumers, starves the learner. The wish follows from two rates that do not depend on the number of generators,
what the learner eats while it does not wait and what a generator makes while it is not blocked, and from a slow trim by
the backlog:

    base = h (batch / EWMA(step seconds)) / g,    g = EWMA(groups/s of an unblocked generator)
    want = clamp(base + clamp((1.5 batch - backlog) / (g 1200 s), +-25 % base), min, max)

It is held while the learner is fed (starved < 3 %), the backlog is neither short nor long (0.5 batch < backlog < 0.8
capacity) and the number of generators would change by less than max(1, 25 %). Where fewer than three batches can wait,
a third of that capacity stands for the batch in trim and hold: a target out of reach would ask for more and more.

What it promises: there always is a wish, between min and max and never -1; without observations it stays as it was;
counters that start anew, members that leave and learners that are replaced are left out of the rates, not read as zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.config import AutoscaleConfig

STEP_WEIGHT = 1 / 4  # of the newest step in the learner's rate
RATE_S = 300.0  # time constant of the generators' rate
STARVED_S = 600.0  # window of the share of time the learner waited
TRIM_S = 1200.0  # in which the trim brings the backlog to its target
TRIM_MAX = 0.25
CALM_STARVED = 0.03
CALM_CHANGE = 0.25


@dataclass(frozen=True)
class Produced:
    """A generator's counters since its start: groups it submitted, seconds it was not short of prompts."""

    groups: float
    unblocked_s: float


@dataclass(frozen=True)
class Consumed:
    """The learner's counters since its start: optimizer steps, seconds in them, seconds it waited for groups."""

    steps: float
    busy_s: float
    starved_s: float


@dataclass(frozen=True)
class Observation:
    """The run at one moment.

    Attributes:
        at: seconds on a clock that never goes back.
        backlog: groups that wait for the learner.
        capacity: groups that can wait at most: the release budget less what is being sampled and trained.
        generators: living generators and their counters; None for those that load or drain.
        learner: None while none is alive, or it does not count yet.
    """

    at: float
    backlog: int
    capacity: int
    generators: Mapping[str, Produced | None]
    learner: Consumed | None


@dataclass(frozen=True)
class Wish:
    """How many generators there should be, and why: `base` and `trim` as in the formula (None: not known yet)."""

    generators: int
    held: bool
    base: float | None = None
    trim: float | None = None
    starved: float = 0.0


@dataclass
class Autoscaler:
    """Call `observe` every few seconds (15 is usual); `wish` is always there.

    Args:
        limits: what the wish is clamped to, and the headroom h.
        batch: groups per optimizer step.
        start: generators wanted before anything is known.
    """

    limits: AutoscaleConfig
    batch: int
    start: int
    wish: Wish = field(init=False)
    _step_s: float | None = field(init=False, default=None)
    _groups: float = field(init=False, default=0.0)  # made, and in how many unblocked seconds; what is long past fades
    _seconds: float = field(init=False, default=0.0)
    _before: Observation | None = field(init=False, default=None)
    _last_step: Consumed | None = field(init=False, default=None)  # the counters when a step had just ended
    _waits: deque[tuple[float, float, float]] = field(init=False, default_factory=deque)  # at, passed, starved

    def __post_init__(self) -> None:
        self.wish = Wish(self._clamped(self.start), held=True)

    def observe(self, now: Observation) -> Wish:
        """The wish after one more look at the run; one that is not newer than the last one changes nothing."""
        before, self._before = self._before, now
        if before is None or now.at <= before.at:
            self._before = before or now
            return self.wish
        self._learn_rate(before, now)
        self._learn_steps(before, now)
        starved = self._starved(now.at)
        step_s = self._step_seconds()
        rate = self._rate
        if rate is None or step_s is None:
            self.wish = Wish(self.wish.generators, held=True, starved=starved)
            return self.wish
        span = min(self.batch, now.capacity / 3)
        base = self.limits.headroom * (self.batch / step_s) / rate
        bound = TRIM_MAX * base
        trim = min(bound, max(-bound, (1.5 * span - now.backlog) / (rate * TRIM_S)))
        want = min(float(self.limits.max), max(float(self.limits.min), base + trim))
        count = len(now.generators)
        fed = starved < CALM_STARVED and 0.5 * span < now.backlog < 0.8 * now.capacity
        held = fed and abs(want - count) < max(1.0, CALM_CHANGE * count)
        # A hold cancels what would shrink the fleet; pods that were asked for and have not come yet stay asked for.
        self.wish = Wish(self._clamped(max(self.wish.generators, count) if held else want), held, base, trim, starved)
        return self.wish

    def _clamped(self, want: float) -> int:
        return min(self.limits.max, max(self.limits.min, math.ceil(want - 1e-9)))

    def _learn_rate(self, before: Observation, now: Observation) -> None:
        """Add what the generators that were there both times made in their unblocked seconds. Sums, not an average of
        rates: between two looks a generator makes no group or one, so that the first rate seen would be far off."""
        groups = seconds = 0.0
        for name, counters in now.generators.items():
            old = before.generators.get(name)
            if counters is None or old is None:
                continue
            if counters.groups < old.groups or counters.unblocked_s < old.unblocked_s:
                continue  # started again under its name
            groups += counters.groups - old.groups
            seconds += counters.unblocked_s - old.unblocked_s
        if seconds <= 0:
            return
        # The longer they could work, the more the past fades; a blocked fleet tells nothing about its rate.
        kept = math.exp(-seconds / len(now.generators) / RATE_S)
        self._groups, self._seconds = kept * self._groups + groups, kept * self._seconds + seconds

    @property
    def _rate(self) -> float | None:
        """Groups per unblocked second of a generator; None while none was made."""
        return self._groups / self._seconds if self._groups > 0 else None

    def _learn_steps(self, before: Observation, now: Observation) -> None:
        old, new, last = before.learner, now.learner, self._last_step
        if old is None or new is None or last is None or new.busy_s < old.busy_s or new.steps < old.steps:
            self._last_step = new  # nobody, or another one
            return
        self._waits.append((now.at, now.at - before.at, new.starved_s - old.starved_s))
        if (steps := new.steps - last.steps) > 0:
            seconds, weight = (new.busy_s - last.busy_s) / steps, 1 - (1 - STEP_WEIGHT) ** steps
            self._step_s = seconds if self._step_s is None else self._step_s + weight * (seconds - self._step_s)
            self._last_step = new

    def _step_seconds(self) -> float | None:
        """The average, with the step in progress as soon as it takes longer than that."""
        learner, last = self._before.learner if self._before else None, self._last_step
        if self._step_s is None or learner is None or last is None:
            return self._step_s
        return self._step_s + STEP_WEIGHT * max(0.0, learner.busy_s - last.busy_s - self._step_s)

    def _starved(self, at: float) -> float:
        while self._waits and self._waits[0][0] <= at - STARVED_S:
            self._waits.popleft()
        passed = sum(each[1] for each in self._waits)
        return sum(each[2] for each in self._waits) / passed if passed else 0.0
