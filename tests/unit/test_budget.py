"""The release budget against a model of the streams: whatever happens, it neither leaks nor overshoots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.budget import may_release
from broker.records import Ledger
from common.config import Config

_EVENTS = ("filter", "submit", "train", "expire", "dead", "settle", "restart")


def _config(max_staleness: int, groups_per_step: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "budget"},
            "model": {"path": "model"},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "staleness": {"max_staleness": max_staleness},
            "learner": {"groups_per_step": groups_per_step},
        }
    )


class _Run:
    """Where every prompt is: the simplest thing that can be right."""

    def __init__(self) -> None:
        self.prompts = self.groups = self.unsettled = self.settled = self.filtered = self.expired = self.dead = 0

    def ledger(self) -> Ledger:
        outstanding = self.prompts + self.groups
        trained = self.unsettled + self.settled
        return Ledger(
            released=outstanding + trained + self.filtered + self.expired + self.dead,
            filtered_wrong=self.filtered,
            trained=trained,
            settled=self.settled,
            expired=self.expired,
            dead=self.dead,
            outstanding=outstanding,
        )

    def apply(self, event: str, count: int) -> None:
        source, target = {
            "filter": ("prompts", "filtered"),
            "submit": ("prompts", "groups"),
            "dead": ("prompts", "dead"),
            "train": ("groups", "unsettled"),
            "expire": ("groups", "expired"),
            "settle": ("unsettled", "settled"),
            "restart": ("unsettled", "groups"),
        }[event]
        moved = getattr(self, source) if event == "restart" else min(count, getattr(self, source))
        setattr(self, source, getattr(self, source) - moved)
        setattr(self, target, getattr(self, target) + moved)


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 8),
    events=st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(1, 8)), max_size=60),
)
def test_may_release_after_any_events_keeps_outstanding_at_its_bound(
    max_staleness: int, groups_per_step: int, events: list[tuple[str, int]]
) -> None:
    config, run = _config(max_staleness, groups_per_step), _Run()
    for event, count in events:
        allowed = may_release(run.ledger(), config)
        assert allowed >= 0
        run.prompts += allowed
        # Full, unless a restart returned trained groups on top: then nothing was released.
        assert run.ledger().outstanding == config.max_outstanding or allowed == 0
        assert run.ledger().outstanding >= config.max_outstanding
        run.apply(event, count)
        assert run.ledger().balanced


@given(groups_per_step=st.integers(1, 8), rounds=st.integers(1, 200))
def test_may_release_with_every_group_filtered_never_runs_dry(groups_per_step: int, rounds: int) -> None:
    config, run = _config(1, groups_per_step), _Run()
    for _ in range(rounds):
        assert may_release(run.ledger(), config) == config.max_outstanding
        run.prompts += config.max_outstanding
        run.apply("filter", config.max_outstanding)


def test_may_release_after_restart_above_bound_waits_until_below() -> None:
    config = _config(0, 4)
    assert may_release(Ledger(released=9, outstanding=9), config) == 0
    assert may_release(Ledger(released=9, outstanding=4), config) == 0
    assert may_release(Ledger(released=9, outstanding=3), config) == 1


def test_ledger_with_a_lost_prompt_is_not_balanced() -> None:
    assert Ledger(released=3, trained=1, filtered_equal=1, outstanding=1, settled=1, submitted=2).balanced
    assert not Ledger(released=3, trained=1, filtered_equal=1).balanced
