"""For every alert: series that make it fire, and series just short of it. A sample a minute, in promtool's notation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`bad` and `good`: what a run's processes say for an hour, name and labels -> samples. `value`: what the
    description says then."""

    bad: dict[str, str]
    good: dict[str, str]
    value: str


def _level(name: str, bad: float, good: float, value: str) -> Case:
    return Case({name: f"{bad}x60"}, {name: f"{good}x60"}, value)


def _share(counters: tuple[str, ...], bad: tuple[int, ...], good: tuple[int, ...], value: str) -> Case:
    """Counters that grow by so much a minute."""
    grow = lambda each: {name: f"0+{step}x60" for name, step in zip(counters, each, strict=True)}  # noqa: E731
    return Case(grow(bad), grow(good), value)


_VERSION = "headrace_policy_version"
_EPOCH = "headrace_generator_weight_epoch"
_STALE = ("headrace_learner_staleness_mean", "headrace_staleness_limit")
_MEMORY = ("headrace_redis_memory_bytes", "headrace_redis_memory_limit_bytes")
_ENDS = tuple(f"headrace_generator_{name}_total" for name in ("failures", "duplicates", "groups", "filtered"))
_FILTER = ('headrace_groups_filtered_total{kind="wrong"}', "headrace_groups_submitted_total")

CASES: dict[str, Case] = {
    "HeadraceLearnerStarving": _level('headrace_learner_phase{phase="waiting"}', 1, 0, "100%"),
    "HeadraceGeneratorsBlocked": _share(
        ("headrace_generator_blocked_seconds_total", "headrace_generator_busy_seconds_total"), (45, 15), (45, 55), "75%"
    ),
    # Long, but no longer than before, is not growing.
    "HeadraceLagGrowing": Case({"headrace_lag_steps": "0x40 3x20"}, {"headrace_lag_steps": "3x60"}, "3"),
    "HeadraceNoProgress": Case({_VERSION: "7x60"}, {_VERSION: "7 7 7 7+1x57"}, "7"),
    # At the bound of 1 everything of a one-step-off-policy run is 1 version old, which is as it should be.
    "HeadraceStalenessNearBound": Case(
        dict(zip(_STALE, ("1.8x60", "2x60"), strict=True)), dict(zip(_STALE, ("1x60", "1x60"), strict=True)), "90%"
    ),
    "HeadraceAborts": _share(_ENDS, (5, 5, 80, 10), (2, 2, 86, 10), "10%"),
    "HeadraceDeadLetters": _level("headrace_dead_letters", 3, 0, "3"),
    "HeadraceConservationBroken": _level("headrace_conservation_error", -2, 0, "2"),
    "HeadraceEffectiveSampleSizeLow": _level("headrace_learner_effective_sample_size", 0.25, 0.35, "25%"),
    "HeadraceSamplerMismatch": _level("headrace_learner_probability_gap", 0.02, 0.004, "20m"),
    "HeadraceEntropyCollapse": _level("headrace_learner_entropy", 0.02, 0.4, "20m"),
    "HeadraceTruncation": _level("headrace_learner_truncated_ratio", 0.5, 0.2, "50%"),
    "HeadraceZeroAdvantage": _share(_FILTER, (60, 40), (40, 60), "60%"),
    "HeadraceKvCacheFull": _level("headrace_generator_kv_cache_ratio", 0.95, 0.85, "95%"),
    "HeadraceCheckpointOld": Case(
        {"headrace_checkpoint_age_seconds": "3600+60x60"}, {"headrace_checkpoint_age_seconds": "3000x60"}, "1h 57m 0s"
    ),
    "HeadraceMembershipFlapping": Case({_EPOCH: "1+1x60"}, {_EPOCH: "1x28 2 3 4 4x30"}, "15"),
    "HeadraceRedisMemory": Case(
        dict(zip(_MEMORY, ("90x60", "100x60"), strict=True)), dict(zip(_MEMORY, ("90x60", "0x60"), strict=True)), "90%"
    ),
    "HeadraceRedisUnreachable": _level("headrace_scrape_errors", 1, 0, ""),
    "HeadraceWishMissing": Case({}, {"headrace_generators_desired": "1x60"}, ""),
}
