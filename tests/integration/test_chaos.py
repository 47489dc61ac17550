"""A few seconds of `make chaos`, so that it does not rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker import Ledger
from tests.chaos.watch import released_above_bound
from tests.chaos.world import Plan, World
from tests.chaos.zygote import Zygote


@pytest.mark.timeout(120)
def test_ten_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    zygote = Zygote(tmp_path / "zygote.log")
    try:
        result = World(Plan(seed=4, kills=10, power=True), tmp_path / "run", zygote).run()
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
