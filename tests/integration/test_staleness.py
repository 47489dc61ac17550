"""Two hundred versions of a simulated fleet: the budget does not leak, and nothing too old is trained.

The feeder, the budget, the choice of batches and the masks are the real ones; engines and optimizer are a heap of
events with a clock of its own. Answer lengths are log-normal, and half of the groups are uninformative. The broker is a
model, so that seconds are enough; a shorter run on a real server shows that the model behaves as it does.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from broker import Broker, Delivery, Lease, Ledger, Sourced
from broker.feeder import Feeder
from common.config import Config
from common.log import Logger
from common.trajectory import Group, Prompt, Response, VersionRun
from learner.batch import Counts, build_step, expired
from learner.pending import Pending

VERSIONS, GROUPS, STALENESS = 200, 8, 2
ENGINES = 2
# Prompts in flight an engine: three quarters of a batch in all, which the masks bear, and one and a half, for which
# `wait` is there. What other ratios cost is in benchmarks/RESULTS.md.
SLOTS = {"mask": 3, "wait": 6}
GROUP_SIZE, MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 4, 60.0, 1.0, 2000
FILTERED = 0.5
# In units of the time one token takes.
TRAIN, BROADCAST = 40.0, 10.0


class Endless:
    def __getitem__(self, position: int) -> Sourced:
        return Sourced(np.array([1, 2], dtype=np.int32), f"prompt {position}", {"answer": "1"})


class Model:
    """A broker without a server: where every prompt is, and nothing else."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.prompts: deque[Prompt] = deque()
        self.leased: dict[str, Prompt] = {}
        self.arrived: deque[Delivery] = deque()
        self.held: dict[str, Prompt] = {}  # answered, not trained
        self.counts = dict.fromkeys(("released", "rereleased", "filtered_wrong", "trained", "settled", "expired"), 0)
        self._version = self._entries = 0

    def ledger(self) -> Ledger:
        return Ledger(**self.counts, outstanding=len(self.prompts) + len(self.leased) + len(self.held))

    def position(self) -> int:
        return self.counts["released"] - self.counts["rereleased"]

    def version(self) -> int:
        return self._version

    def release(self, prompts: Sequence[Prompt], position: int, most_outstanding: int) -> bool:
        assert position == self.position()
        assert self.ledger().outstanding + len(prompts) <= most_outstanding
        self.prompts += prompts
        self.counts["released"] += len(prompts)
        return True

    def lease(self, consumer: str, count: int, block_ms: int) -> list[Lease]:
        leases = []
        while self.prompts and len(leases) < count:
            self._entries += 1
            leases.append(Lease(str(self._entries), self.prompts.popleft()))
            self.leased[leases[-1].entry_id] = leases[-1].prompt
        return leases

    def filtered(self, consumer: str, entry_id: str, kind: str) -> bool:
        del self.leased[entry_id]
        self.counts["filtered_wrong"] += 1
        return True

    def submit(self, consumer: str, lease: Lease, group: Group) -> bool:
        self.held[group.group_id] = self.leased.pop(lease.entry_id)
        self.arrived.append(Delivery(lease.entry_id, group))
        return True

    def begin(self, version: int, contained: Sequence[str]) -> int:
        return 1

    def take(self, epoch: int, count: int, block_ms: int) -> list[Delivery]:
        return [self.arrived.popleft() for _ in range(min(count, len(self.arrived)))]

    def expire(self, epoch: int, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            self.prompts.append(replace(self.held.pop(each.group.group_id), released_version=self._version))
            for counter in ("expired", "released", "rereleased"):
                self.counts[counter] += 1

    def step(self, epoch: int, version: int, deliveries: Sequence[Delivery]) -> None:
        self._version = version
        for each in deliveries:
            del self.held[each.group.group_id]
        self.counts["trained"] += len(deliveries)

    def settle(self, epoch: int, group_ids: Sequence[str]) -> None:
        self.counts["settled"] += len(group_ids)

    def outstanding_until(self, versions: Sequence[int]) -> list[int]:
        released = [each.released_version for each in (*self.prompts, *self.leased.values(), *self.held.values())]
        return [sum(each <= version for each in released) for version in versions]


@dataclass
class Fleet:
    """`now` is the simulation's clock; `switches` holds, per engine, when its weights became which version."""

    broker: Broker | Model
    rng: np.random.Generator
    now: float = 0.0
    version: int = 0
    training: bool = False
    counts: Counts = field(default_factory=Counts)
    oldest: int = 0
    expired: int = 0
    outstanding: int = 0

    def __post_init__(self) -> None:
        self.config = self.broker.config
        self.feeder = Feeder(self.broker, Endless(), Logger("test", "feeder"))  # type: ignore[arg-type]
        self.pending = Pending(self.config)
        self.epoch = self.broker.begin(0, ())
        self.switches = [[0.0] for _ in range(ENGINES)]  # index: version
        self.free = [SLOTS[self.config.staleness.expired_tokens]] * ENGINES
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what))

    def run(self, versions: int) -> None:
        while self.version < versions:
            self._turn()
            assert self.events, f"nothing happens any more at version {self.version}: {self.broker.ledger()}"
            self.now, _, happen = heapq.heappop(self.events)
            happen()

    def _turn(self) -> None:
        """All that can begin now, begins."""
        while self.feeder.feed():
            pass
        self.outstanding = max(self.outstanding, self.broker.ledger().outstanding)
        for engine in range(ENGINES):
            leases = self.broker.lease(f"g{engine}", self.free[engine], 0) if self.free[engine] else []
            self.free[engine] -= len(leases)
            for lease in leases:
                self._sample(engine, lease)
        if not self.training:
            self._begin_step()

    def _sample(self, engine: int, lease: Lease) -> None:
        lengths = np.minimum(self.rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, GROUP_SIZE).astype(int) + 1, MAX_TOKENS)
        wanted = max(lease.prompt.released_version - self.config.staleness.sampling_lag, 0)
        start = max(self.now, self.switches[engine][wanted])
        mixed = self.rng.random() >= FILTERED
        self.at(start + float(lengths.max()), lambda: self._answer(engine, lease, start, lengths.tolist(), mixed))

    def _answer(self, engine: int, lease: Lease, start: float, lengths: list[int], mixed: bool) -> None:
        self.free[engine] += 1
        name, prompt = f"g{engine}", lease.prompt
        if not mixed:
            assert self.broker.filtered(name, lease.entry_id, "wrong")
            return
        responses = tuple(self._response(engine, start, n, float(i)) for i, n in enumerate(lengths))
        group = Group(prompt.group_id, prompt.token_ids, responses, name, 1.0, self.now, prompt.released_version)
        assert self.broker.submit(name, lease, group)
        for delivery in self.broker.take(self.epoch, GROUPS, 0):
            if expired(delivery.group, self.config, self.version):
                self._expire([delivery])
            else:
                self.pending.add(delivery)

    def _response(self, engine: int, start: float, tokens: int, reward: float) -> Response:
        """Every token is stamped with the version its engine has at the time."""
        switches = self.switches[engine]
        first = bisect_right(switches, start) - 1
        runs = [VersionRun(first, 0)]
        for version in range(first + 1, len(switches)):
            at = int(np.ceil(switches[version] - start))
            if at >= tokens:
                break
            if at == runs[-1].start:
                runs.pop()
            runs.append(VersionRun(version, at))
        ids, logprobs = np.ones(tokens, np.int32), np.full(tokens, -1, np.float32)
        return Response(ids, logprobs, tuple(runs), "stop", reward, reward, reward > 0)

    def _begin_step(self) -> None:
        self._expire(self.pending.take_expired(self.version))
        if not self.pending.full:
            return
        bounds = self.pending.bounds(self.version)
        batch = self.pending.choose(self.version, self.broker.outstanding_until(bounds))
        if batch is None:
            return
        step = build_step([each.group for each in batch], self.config, self.version)
        self.oldest = max(self.oldest, step.counts.staleness_max)
        self.counts += step.counts
        self.training = True

        def end() -> None:
            self.training = False
            self.version += 1
            self.broker.step(self.epoch, self.version, batch)
            self.broker.settle(self.epoch, [each.group.group_id for each in batch])
            for engine, switches in enumerate(self.switches):
                switches.append(max(self.now + BROADCAST * (engine + 1) / ENGINES, switches[-1]))

        self.at(self.now + TRAIN, end)

    def _expire(self, deliveries: Sequence[Delivery]) -> None:
        self.expired += len(deliveries)
        self.broker.expire(self.epoch, deliveries)


def configure(make_config: Callable[..., Config], policy: str) -> Config:
    logging.getLogger("headrace").setLevel(logging.ERROR)
    return make_config(
        staleness={"max_staleness": STALENESS, "expired_tokens": policy},
        learner={"groups_per_step": GROUPS, "settle_on": "step", "micro_batch_tokens": 4096},
        sampling={"group_size": GROUP_SIZE, "max_response_tokens": MAX_TOKENS},
    )


def check(fleet: Fleet, policy: str, versions: int) -> None:
    ledger, counts = fleet.broker.ledger(), fleet.counts
    assert ledger.balanced
    assert ledger.trained == ledger.settled == versions * GROUPS
    assert ledger.filtered > 0.8 * ledger.trained, "half of what is sampled teaches nothing"
    assert fleet.outstanding == fleet.broker.config.max_outstanding == (STALENESS + 1) * GROUPS
    assert fleet.oldest <= STALENESS
    assert counts.staleness_mean > 0.3, "the fleet does run ahead of the learner"
    assert ledger.expired == ledger.rereleased == fleet.expired
    if policy == "mask":
        assert counts.expired_tokens < 0.01 * counts.tokens
    else:
        assert (counts.expired_tokens, fleet.expired) == (0, 0)


@pytest.mark.parametrize("policy", ["mask", "wait"])
def test_two_hundred_versions_with_half_of_the_groups_filtered_stay_within_the_bound(
    make_config: Callable[..., Config], policy: str
) -> None:
    fleet = Fleet(Model(configure(make_config, policy)), np.random.default_rng(1))
    fleet.run(VERSIONS)
    check(fleet, policy, VERSIONS)


def test_the_model_of_the_broker_is_the_broker(make_config: Callable[..., Config]) -> None:
    runs = []
    config = configure(make_config, "wait")
    for broker in (Broker.connect(config), Model(config)):
        fleet = Fleet(broker, np.random.default_rng(2))
        fleet.run(8)
        check(fleet, "wait", 8)
        runs.append((fleet.now, fleet.counts, replace(broker.ledger(), submitted=0)))
    assert runs[0] == runs[1]
