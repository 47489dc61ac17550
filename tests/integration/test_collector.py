"""The learner's end of the group stream, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from broker import Broker, Delivery
from common.config import Config
from common.trajectory import Group, Prompt, Response, VersionRun
from learner.collector import Collector

NEVER = threading.Event()


def submit(broker: Broker, version: int, count: int) -> None:
    """Release and answer prompts, every token sampled by `version`."""
    position = broker.position()
    tokens = np.array([1, 2, 3], dtype=np.int32)
    prompts = [Prompt(f"{position + i:09d}", tokens, "text", released_version=version) for i in range(count)]
    assert broker.release(prompts, position)
    for lease in broker.lease("g", count, 1000):
        responses = tuple(
            Response(tokens, np.full(3, -1, np.float32), (VersionRun(version, 0),), "stop", r, r, bool(r))
            for r in (0.0, 1.0)
        )
        group = Group(lease.prompt.group_id, tokens, responses, "g", 1.0, 0.0, lease.prompt.released_version)
        assert broker.submit("g", lease, group)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(staleness={"max_staleness": 1})


def test_next_leaves_out_and_reports_groups_that_are_too_old(config: Config) -> None:
    broker = Broker.connect(config)
    epoch = broker.begin(5, ())
    submit(broker, version=3, count=2)
    submit(broker, version=4, count=5)
    collector = Collector(broker, epoch, config)
    try:
        batch = collector.next(5, 20.0, NEVER)
        assert batch is not None
        assert [delivery.group.oldest_version for delivery in batch.deliveries] == [4] * 4
        assert broker.ledger().expired == 2
        # The fifth fresh group waits for the next batch, and ages meanwhile.
        assert collector.next(6, 0.2, NEVER) is None
        ledger = broker.ledger()
        assert (ledger.expired, ledger.rereleased, ledger.outstanding, ledger.balanced) == (3, 3, 7, True)
        assert [each.prompt.group_id for each in broker.lease("g", 9, 0)] == ["000000000", "000000001", "000000006"]
    finally:
        collector.close()


def test_next_with_wait_returns_when_the_last_prompt_that_is_due_ends(make_config: Callable[..., Config]) -> None:
    config = make_config(staleness={"max_staleness": 1, "expired_tokens": "wait"}, learner={"groups_per_step": 2})
    broker = Broker.connect(config)
    broker.release([Prompt("000000000", np.array([1], dtype=np.int32), "long", released_version=4)], 0)
    (slow,) = broker.lease("slow", 1, 1000)
    epoch = broker.begin(5, ())
    submit(broker, version=5, count=3)
    collector = Collector(broker, epoch, config)
    try:
        assert collector.next(5, 0.3, NEVER) is None, "released at 4, it must be trained at 5"
        assert broker.filtered("slow", slow.entry_id, "wrong")
        batch = collector.next(5, 20.0, NEVER)
        assert batch is not None
        assert [delivery.group.group_id for delivery in batch.deliveries] == ["000000001", "000000002"]
        assert broker.ledger().expired == 0
    finally:
        collector.close()


def test_next_returns_early_when_told_to_stop(config: Config) -> None:
    broker = Broker.connect(config)
    collector = Collector(broker, broker.begin(0, ()), config)
    stopping = threading.Event()
    stopping.set()
    try:
        assert collector.next(0, 600.0, stopping) is None
    finally:
        collector.close()


class Halting:
    """A broker that stops giving groups after so many; `dry` says that it was asked for more."""

    def __init__(self, broker: Broker, groups: int) -> None:
        self._broker, self._left = broker, groups
        self.dry, self.ended = threading.Event(), threading.Event()

    def take(self, epoch: int, count: int, block_ms: int) -> list[Delivery]:
        if not self._left:
            self.dry.set()
            self.ended.wait()
            return []
        taken = self._broker.take(epoch, min(count, self._left), block_ms)
        self._left -= len(taken)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def test_next_finds_two_batches_read_and_decoded_before_it_was_called(config: Config) -> None:
    broker = Broker.connect(config)
    epoch = broker.begin(5, ())
    wanted = config.learner.groups_per_step
    submit(broker, version=5, count=3 * wanted)
    halting = Halting(broker, 2 * wanted)
    collector = Collector(cast(Broker, halting), epoch, config)
    try:
        assert halting.dry.wait(30), "it reads ahead without being asked"
        batches = [collector.next(5, 0.0, NEVER) for _ in range(2)]
        assert [len(batch.deliveries) for batch in batches if batch is not None] == [wanted, wanted]
        assert collector.next(5, 0.0, NEVER) is None
    finally:
        halting.ended.set()
        collector.close()
