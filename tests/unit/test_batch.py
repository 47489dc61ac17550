"""From groups to a step: masks, counts, normalisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learner_inputs import make_config, make_group, make_response

from common.errors import HeadraceError
from common.trajectory import Group
from learner.advantage import group_advantages
from learner.batch import Counts, build_step, expired, sequence_scale, split_groups


def group_of(*responses: Any, group_id: str = "a") -> Group:
    return replace(make_group(np.random.default_rng(1), group_id, 4, [1]), responses=responses)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_step_tokens_beyond_max_staleness_masked_and_counted(rng: np.random.Generator) -> None:
    config = make_config(staleness={"max_staleness": 2})
    group = group_of(make_response(rng, 10, 1.0, [(4, 0), (5, 3), (7, 6)]), make_response(rng, 4, -1.0, [(7, 0)]))
    step = build_step([group], config, policy_version=7)
    first, second = step.groups[0].sequences
    assert first.mask.tolist() == [False] * 3 + [True] * 7
    assert second.mask.all()
    assert (step.counts.expired_tokens, step.counts.trained_tokens, step.counts.tokens) == (3, 11, 14)
    assert step.counts.staleness == ((0, 8), (2, 3))
    assert step.counts.staleness_max == 2
    assert step.counts.staleness_mean == pytest.approx(6 / 11)
    assert step.tokens == 11
    np.testing.assert_allclose(step.scale_of_sequence, 1 / 11)


def test_step_tokens_from_a_lost_future_are_as_far_off_as_old_ones(rng: np.random.Generator) -> None:
    group = group_of(make_response(rng, 4, 1.0, [(5, 0), (9, 2)]), make_response(rng, 2, -1.0, [(5, 0)]))
    step = build_step([group], make_config(staleness={"max_staleness": 2}), policy_version=5)
    assert step.groups[0].sequences[0].mask.tolist() == [True, True, False, False]


def test_step_versions_that_fall_judged_token_by_token(rng: np.random.Generator) -> None:
    group = group_of(make_response(rng, 6, 1.0, [(8, 0), (9, 2), (5, 4)]), make_response(rng, 2, -1.0, [(8, 0)]))
    step = build_step([group], make_config(staleness={"max_staleness": 2}), policy_version=7)
    assert step.groups[0].sequences[0].versions.tolist() == [8, 8, 9, 9, 5, 5]
    assert step.counts.staleness == ((1, 4), (2, 4))
    step = build_step([group], make_config(staleness={"max_staleness": 1}), policy_version=8)
    assert step.groups[0].sequences[0].mask.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("on", [True, False])
def test_overlong_filter_truncated_response_leaves_loss_but_not_advantages(rng: np.random.Generator, on: bool) -> None:
    responses = [make_response(rng, 3, 1.0), make_response(rng, 5, -1.0, finish="length"), make_response(rng, 2, 0.5)]
    step = build_step([group_of(*responses)], make_config(objective={"overlong_filter": on}), 0)
    sequences = step.groups[0].sequences
    assert [bool(s.mask.all()) for s in sequences] == [True, not on, True]
    np.testing.assert_array_equal([s.advantage for s in sequences], group_advantages([1.0, -1.0, 0.5]))
    assert step.tokens == (5 if on else 10)
    assert step.counts.filtered_tokens == (5 if on else 0)
    assert step.counts.truncated == 1


def test_step_everything_too_old_has_no_tokens_and_no_nan(rng: np.random.Generator) -> None:
    step = build_step([make_group(rng, "a", 3, [4, 5])], make_config(), policy_version=100)
    assert step.tokens == 0
    assert not step.scale_of_sequence.any()
    assert step.counts.staleness_mean == 0.0


def test_step_same_group_twice_refused(rng: np.random.Generator) -> None:
    group = make_group(rng, "a", 3, [4, 5])
    with pytest.raises(HeadraceError, match="group a is 2 times"):
        build_step([group, group], make_config(), 0)


def test_step_group_of_another_temperature_refused(rng: np.random.Generator) -> None:
    group = replace(make_group(rng, "a", 3, [4, 5]), temperature=0.7)
    with pytest.raises(HeadraceError, match=r"temperature 0\.7"):
        build_step([group], make_config(), 0)


@pytest.mark.parametrize(("mode", "wanted"), [("drop", [False, True, True]), ("mask", [False, False, True])])
def test_expired_any_old_token_drops_and_all_old_tokens_mask(
    rng: np.random.Generator, mode: str, wanted: list[bool]
) -> None:
    config = make_config(staleness={"max_staleness": 1, "expired_tokens": mode})
    fresh, old = make_response(rng, 4, 1.0, [(9, 0)]), make_response(rng, 4, 1.0, [(8, 0)])
    groups = [group_of(fresh, fresh), group_of(fresh, old), group_of(old, old)]
    assert [expired(group, config, 10) for group in groups] == wanted


def test_split_deals_every_group_once_into_even_parts(rng: np.random.Generator) -> None:
    groups = [make_group(rng, str(i), 2, [1, 2]) for i in range(7)]
    parts = split_groups(groups, 3)
    assert [len(part) for part in parts] == [3, 2, 2]
    assert sorted(group.group_id for part in parts for group in part) == sorted(g.group_id for g in groups)


def test_scale_each_aggregation_by_hand() -> None:
    tokens = np.array([2, 0, 4, 6], dtype=np.int64)
    prompts = np.array([0, 0, 1, 1])
    wanted = {
        "token_mean": [1 / 12, 0, 1 / 12, 1 / 12],
        "sequence_mean_token_mean": [1 / 6, 0, 1 / 12, 1 / 18],
        "sequence_mean_token_sum": [1 / 3, 0, 1 / 3, 1 / 3],
        "prompt_token_mean": [1 / 4, 0, 1 / 20, 1 / 20],
    }
    for aggregation, scale in wanted.items():
        np.testing.assert_allclose(sequence_scale(tokens, prompts, aggregation), scale, err_msg=aggregation)


def test_scale_prompt_without_tokens_is_no_prompt() -> None:
    scale = sequence_scale(np.array([0, 5]), np.array([0, 1]), "prompt_token_mean")
    np.testing.assert_allclose(scale, [0, 1 / 5])


def test_counts_added_over_steps_equal_one_step(rng: np.random.Generator) -> None:
    groups = [make_group(rng, str(i), 3, [2 + i, 5, 1]) for i in range(4)]
    config = make_config()
    parts = [build_step(part, config, 1).counts for part in split_groups(groups, 2)]
    added, whole = sum(parts, Counts()), build_step(groups, config, 1).counts
    assert added == replace(whole, reward=pytest.approx(whole.reward), raw_reward=pytest.approx(whole.raw_reward))
