"""Two hundred versions of a simulated fleet on a real broker: the budget does not leak, and nothing too old is trained.

The feeder, the broker's scripts, the choice of batches and the masks are the real ones; engines and optimizer are a heap
of events with a clock of its own. Answer lengths are log-normal, and half of the groups are uninformative.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from broker import Broker, Lease, Sourced
from broker.feeder import Feeder
from common.config import Config
from common.log import Logger
from common.trajectory import Group, Response, VersionRun
from learner.batch import Counts, build_step, expired
from learner.pending import Pending

VERSIONS, GROUPS, STALENESS = 200, 4, 2
ENGINES, SLOTS = 2, 3
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 60.0, 0.6, 400
FILTERED = 0.5
# In units of the time one token takes.
TRAIN, BROADCAST = 40.0, 10.0


class Endless:
    def __getitem__(self, position: int) -> Sourced:
        return Sourced(np.array([1, 2], dtype=np.int32), f"prompt {position}", {"answer": "1"})


@dataclass
class Fleet:
    """`now` is the simulation's clock; `switches` holds, per engine, when its weights became which version."""

    broker: Broker
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
        self.free = [SLOTS] * ENGINES
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what))

    def run(self) -> None:
        while self.version < VERSIONS:
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
        lengths = np.minimum(self.rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, 2).astype(int) + 1, MAX_TOKENS)
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
        assert self.broker.submit(name, lease.entry_id, group)
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

    def _expire(self, deliveries: list) -> None:  # type: ignore[type-arg]
        self.expired += len(deliveries)
        self.broker.expire(self.epoch, deliveries)


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_two_hundred_versions_with_half_of_the_groups_filtered_stay_within_the_bound(
    make_config: Callable[..., Config], policy: str
) -> None:
    config = make_config(
        staleness={"max_staleness": STALENESS, "expired_tokens": policy},
        learner={"groups_per_step": GROUPS, "settle_on": "step"},
    )
    logging.getLogger("headrace").setLevel(logging.ERROR)
    broker = Broker.connect(config)
    fleet = Fleet(broker, np.random.default_rng(1))
    fleet.run()
    ledger, counts = broker.ledger(), fleet.counts
    print(policy, fleet.now, ledger, fleet.oldest, fleet.expired, counts.expired_tokens, counts.tokens, counts.staleness)
    assert ledger.balanced
    assert ledger.trained == ledger.settled == VERSIONS * GROUPS
    assert ledger.filtered > 0.8 * ledger.trained, "half of what was sampled taught nothing"
    assert fleet.outstanding == config.max_outstanding == (STALENESS + 1) * GROUPS
    assert fleet.oldest <= STALENESS
    if policy == "mask":
        assert 0 <= counts.expired_tokens < 0.01 * counts.tokens
        assert counts.staleness_mean > 0.3, "the simulated fleet does run ahead of the learner"
    else:
        assert counts.expired_tokens == 0
    if policy == "wait":
        assert fleet.expired == 0
    assert broker._client.zcard(broker.keys.outstanding) == ledger.outstanding
    broker.close()
