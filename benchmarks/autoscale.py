"""Does the autoscaler keep the learner fed with few idle generators? A simulation of hours in seconds.

    python -m benchmarks.autoscale [--seeds 20] [--hours 6] [--json]

A learner takes batches from a bounded queue that generators fill; pods load for minutes, figures arrive half a minute
late, and what moves the pods is the horizontal autoscaler's own arithmetic with the settings of the chart. The runs
begin with two generators, so that each starves at first. The workloads:

- `speed`: the learner becomes twice as fast after two hours and three times slower after four, lengths drift;
- `longer`: responses grow to four times their length, as they do in reasoning runs, while steps slow down less;
- `spot`: noisy rates and steps, and now and then a fifth of the pods is taken away.

`starved` is the share of time the learner waited, `blocked` the share of generator time without room for another group,
`flips` how often the number of pods changed its direction. For comparison: the rule "more groups waiting, more
generators", which is right for consumers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from broker.autoscale import Autoscaler, Consumed, Observation, Produced
from broker.scaling import Pace
from common.config import AutoscaleConfig

BATCH = 64  # groups a step
QUEUE = 4 * BATCH  # groups that can wait
RATE = 1 / 15  # groups/s of a generator
LOAD_S = 180.0  # until a new pod serves
JOIN_S = 60.0  # until the coordinator knows of it
DELAY_S = 30.0  # until a figure is seen
SYNC_S = 15.0
JUDGED, BLIND, BLIND_S = "h 1.0", "10 min without figures", 600.0
TARGETS = {"starved": 0.05, "blocked": 0.06, "flips": 6.0}


@dataclass(frozen=True)
class Workload:
    """What the learner and the generators do at `x`, the part of the time that has passed (0 to 1)."""

    step_s: Callable[[float], float]
    rate: Callable[[float], float]  # relative to RATE
    noise: float = 0.1  # of a step's time, relative
    losses_per_hour: float = 0.0  # times that a fifth of the pods is taken away


def _drift(x: float) -> float:
    return 1 + 0.25 * math.sin(4 * math.pi * x)


WORKLOADS = {
    "speed": Workload(lambda x: 120 if x < 1 / 3 else 60 if x < 2 / 3 else 180, _drift, noise=0.06),
    "longer": Workload(lambda x: 90 * (1 + x), lambda x: 4**-x),
    "spot": Workload(lambda x: 100, _drift, noise=0.15, losses_per_hour=1.0),
}


# The number of generators wanted, of an observation (None: the figures are missing) and the pods there are.
Rule = Callable[[Observation | None, int], float]


@dataclass(frozen=True)
class Outcome:
    """Shares of time and of generator time, direction changes, steps, generator hours, largest fleet."""

    starved: float
    blocked: float
    flips: int
    steps: int
    generator_hours: float
    largest: int


@dataclass
class _Pod:
    """Generators work alike, so a pod's counters are the fleet's, less what they were when it began to serve."""

    name: str
    joined_at: float
    ready_at: float
    groups: float | None = None  # the fleet's counter when it became ready
    unblocked_s: float = 0.0


@dataclass
class Simulation:
    """One run, in steps of `dt` seconds, under `rule`."""

    workload: Workload
    rule: Rule
    seed: int
    hours: float = 6.0
    dt: float = 5.0
    blind: tuple[float, float] | None = None  # seconds between which there are no figures
    maximum: int = 32
    start: int = 2

    def run(self) -> Outcome:
        self.random, self.total = random.Random(self.seed), self.hours * 3600
        self.pods = [_Pod(f"g{number}", 0.0, 0.0) for number in range(self.start)]
        self.loading = list(self.pods)
        self.made, self.pace, self.seen = self.start, Pace(1, self.maximum), deque[Observation]()
        self.waiting = self.finished = self.left = 0.0  # groups in the queue, groups without room, seconds of the step
        self.groups = self.unblocked_s = 0.0  # of a generator that was there all the time
        self.busy = self.starved = self.blocked = self.pod_s = 0.0
        self.steps = self.flips = self.direction = 0
        self.largest = self.start
        losses = self._losses()
        for tick in range(int(self.total / self.dt)):
            at = tick * self.dt
            self._generate(at)
            self._train(at)
            if losses and at >= losses[0]:
                losses.pop(0)
                for pod in self.random.sample(self.pods, max(1, len(self.pods) // 5)):
                    self.pods.remove(pod)
                    self._add(at)  # the Deployment makes it anew
                self.loading = [pod for pod in self.pods if pod.groups is None]
            if at % SYNC_S == 0:
                self._scale(at)
        hours = self.pod_s / 3600
        shares = self.starved / self.total, self.blocked / self.pod_s
        return Outcome(*shares, self.flips, self.steps, hours, self.largest)

    def _generate(self, at: float) -> None:
        for pod in self.loading:
            if pod.ready_at <= at:
                pod.groups, pod.unblocked_s = self.groups, self.unblocked_s
        self.loading = [pod for pod in self.loading if pod.groups is None]
        serving = len(self.pods) - len(self.loading)
        self.pod_s += self.dt * len(self.pods)
        if not serving:
            return
        noise = max(0.2, self.random.gauss(1, 0.23 / math.sqrt(serving)))
        rate = RATE * self.workload.rate(at / self.total) * noise * serving
        self.finished += rate * self.dt
        given = min(self.finished, max(0.0, QUEUE - self.waiting))
        self.finished -= given
        self.waiting += given
        # Each holds one finished group, then it waits for room.
        lost = min(self.dt, max(0.0, self.finished - serving) / rate)
        self.finished = min(self.finished, float(serving))
        self.blocked += lost * serving
        self.groups += given / serving
        self.unblocked_s += self.dt - lost

    def _train(self, at: float) -> None:
        left = self.dt
        while left > 0:
            if self.left <= 0:
                if self.waiting < BATCH:
                    self.starved += left
                    return
                self.waiting -= BATCH
                noise = max(0.3, self.random.gauss(1, self.workload.noise))
                self.left = self.workload.step_s(at / self.total) * noise
            part = min(self.left, left)
            self.left, left, self.busy = self.left - part, left - part, self.busy + part
            self.steps += self.left <= 0

    def _scale(self, at: float) -> None:
        counters = {
            pod.name: None
            if pod.groups is None
            else Produced(math.floor(self.groups - pod.groups), self.unblocked_s - pod.unblocked_s)
            for pod in self.pods
            if pod.joined_at <= at
        }
        learner = Consumed(self.steps, self.busy, self.starved)
        self.seen.append(Observation(at, int(self.waiting), QUEUE, counters, learner))
        while len(self.seen) > 1 and self.seen[1].at <= at - DELAY_S:
            self.seen.popleft()
        blind = self.blind is not None and self.blind[0] <= at < self.blind[1]
        known = None if blind or self.seen[0].at > at - DELAY_S else self.seen[0]
        target = self.pace.step(at, len(self.pods), self.rule(known, len(self.pods)))
        if target != len(self.pods):
            self.flips += self.direction * (target - len(self.pods)) < 0
            self.direction = target - len(self.pods)
        while len(self.pods) < target:
            self._add(at)
        del self.pods[target:]
        self.loading = [pod for pod in self.pods if pod.groups is None]
        self.largest = max(self.largest, target)

    def _add(self, at: float) -> None:
        self.pods.append(_Pod(f"g{self.made}", at + JOIN_S, at + LOAD_S * self.random.uniform(0.8, 1.3)))
        self.made += 1

    def _losses(self) -> list[float]:
        at, found = 0.0, []
        while self.workload.losses_per_hour:
            at += self.random.expovariate(self.workload.losses_per_hour / 3600)
            if at >= self.total:
                break
            found.append(at)
        return found


def ours(maximum: int = 32, headroom: float = 1.0) -> Rule:
    """The rule of `broker.autoscale`; missing figures leave the gauge as it is."""
    scaler = Autoscaler(AutoscaleConfig(max=maximum, headroom=headroom), BATCH, start=2)

    def wish(seen: Observation | None, _pods: int) -> float:
        return float((scaler.observe(seen) if seen is not None else scaler.wish).generators)

    return wish


def by_length(seen: Observation | None, pods: int) -> float:
    """The rule for consumers: a generator per batch that waits."""
    return max(1.0, seen.backlog / BATCH) if seen is not None else float(pods)


def measure(
    workload: Workload,
    rule: Callable[[], Rule],
    seeds: int,
    hours: float = 6.0,
    blind_from: Callable[[int], float] | None = None,
) -> dict[str, float]:
    """Means over seeds, and the worst of each figure that has a target. `blind_from(seed)`: the second from which on
    there are no figures for ten minutes."""
    found = []
    for seed in range(seeds):
        since = None if blind_from is None else blind_from(seed)
        blind = None if since is None else (since, since + BLIND_S)
        found.append(Simulation(workload, rule(), seed, hours, blind=blind).run())
    means = {name: fmean(getattr(each, name) for each in found) for name in Outcome.__dataclass_fields__}
    return {**means, **{f"{name}_worst": float(max(getattr(each, name) for each in found)) for name in TARGETS}}


def any_time(hours: float) -> Callable[[int], float]:
    """A second for every seed, all over the run."""
    return lambda seed: random.Random(seed).uniform(0, hours * 3600 - BLIND_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = table(options.seeds, options.hours)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print("| workload, rule | starved (worst) | blocked (worst) | flips (worst) | steps | generator hours |")
        print("|---" * 6 + "|")
        for name, row in rows.items():
            shares = [f"{row[each]:.1%} ({row[f'{each}_worst']:.1%})" for each in ("starved", "blocked")]
            flips = f"{row['flips']:.1f} ({row['flips_worst']:.0f})"
            print(f"| {name} | {' | '.join(shares)} | {flips} | {row['steps']:.0f} | {row['generator_hours']:.0f} |")
    judged = [row for name, row in rows.items() if name.endswith((JUDGED, BLIND))]
    return int(any(row[name] > limit for row in judged for name, limit in TARGETS.items()))


def table(seeds: int, hours: float) -> dict[str, dict[str, float]]:
    """Every workload under every rule."""
    rows = {}
    for name, workload in WORKLOADS.items():
        for headroom in (0.95, 1.0, 1.05):
            rows[f"{name}, h {headroom}"] = measure(workload, partial(ours, headroom=headroom), seeds, hours)
        rows[f"{name}, {BLIND}"] = measure(workload, ours, seeds, hours, any_time(hours))
        # The worst moment of `speed`: the learner has just become twice as fast.
        rows[f"{name}, blind after a third"] = measure(workload, ours, seeds, hours, lambda _: hours * 1200)
        rows[f"{name}, by queue length"] = measure(workload, lambda: by_length, seeds, hours)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
