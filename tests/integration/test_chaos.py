"""A few seconds of `make chaos`, so that it does not rot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from broker_helpers import MakeConfig, prompt

from broker import Broker, Ledger
from common.log import Logger
from generator.loop import Generator
from tests.chaos.players import LightEngine
from tests.chaos.watch import released_above_bound
from tests.chaos.world import Plan, World
from tests.chaos.zygote import Zygote


@pytest.mark.timeout(120)
def test_ten_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    zygote = Zygote(tmp_path / "zygote.log")
    try:
        result = World(Plan(seed=4, kills=10, mean_gap_s=0.05, power=True), tmp_path / "run", zygote).run()
    finally:
        zygote.close()
    assert result.problems == []
    assert sum(result.kills.values()) == 10 and result.kills["server"] > 0
    assert result.verdict.trained > 0 and result.samples > 0


def test_a_release_beyond_the_bound_is_seen_unless_it_was_none() -> None:
    full = Ledger(released=20, outstanding=18)
    assert released_above_bound(full, Ledger(released=21, outstanding=19), 18)
    assert not released_above_bound(full, Ledger(released=20, outstanding=24), 18)
    assert not released_above_bound(full, Ledger(released=24, outstanding=18), 18)


async def test_prompt_of_a_learner_that_died_does_not_wait_for_its_version(make_config: MakeConfig) -> None:
    """It was released at version 3; the successor has resumed from version 0 and cannot go on without groups."""
    config = make_config(staleness={"max_staleness": 2})
    broker = Broker.connect(config)
    generator = Generator(config, "g1", broker, Logger("run", "g1"), LightEngine(config, 0.0))  # type: ignore[arg-type]
    generator.receiver.standing.version = 0
    released = replace(prompt(0), released_version=3)
    broker.begin(3, [])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generator._wait_until_current(released), 0.1)
    broker.begin(0, [])
    await asyncio.wait_for(generator._wait_until_current(released), 5.0)
    broker.close()
