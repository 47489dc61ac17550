"""Packed micro-batches: completeness, the limit, balance, the wire."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_inputs import make_config, make_group

from common.errors import HeadraceError, WireError
from common.wire import pack
from learner.batch import Step, build_step, sequence_scale
from learner.layout import assign, layout
from learner.level import level
from learner.packing import Packed, plan, surviving_tokens
from learner.parts import LINEAR_COST, Part

SHAPES = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=2, max_size=6)), min_size=1, max_size=8
)


def make_step(shapes: list[tuple[int, list[int]]], seed: int = 0) -> Step:
    rng = np.random.default_rng(seed)
    groups = [make_group(rng, str(i), prompt, lengths) for i, (prompt, lengths) in enumerate(shapes)]
    return build_step(groups, make_config(), 0)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4), st.integers(50, 200))
def test_plan_any_step_every_sequence_once_whole_and_within_limit(
    shapes: list[tuple[int, list[int]]], ranks: int, limit: int
) -> None:
    step = make_step(shapes)
    shares = plan(step, ranks, limit)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    sequences = {s.index: (group, s) for group in step.groups for s in group.sequences}
    seen: list[int] = []
    for packed in (packed for share in shares for packed in share):
        assert 1 <= len(packed.input_ids) <= limit
        assert len(set(packed.group_of.tolist())) == packed.group_of.max() + 1
        for index in np.unique(packed.sequence_index):
            group, sequence = sequences[int(index)]
            at = packed.sequence_index == index
            np.testing.assert_array_equal(packed.targets[at], sequence.token_ids)
            np.testing.assert_array_equal(packed.behav_logp[at], sequence.behav_logp)
            np.testing.assert_array_equal(packed.mask[at], sequence.mask)
            np.testing.assert_array_equal(packed.version[at], sequence.versions)
            np.testing.assert_array_equal(packed.scale[at], step.scale_of_sequence[index])
            assert (packed.advantage[at] == sequence.advantage).all()
            # what its first token is predicted from: the end of its own prompt
            end = int(packed.predict_from[at][0])
            prompt = len(group.prompt_ids)
            np.testing.assert_array_equal(packed.input_ids[end - prompt + 1 : end + 1], group.prompt_ids)
            np.testing.assert_array_equal(packed.position_ids[end - prompt + 1 : end + 1], np.arange(prompt))
            assert (packed.response_of[end - prompt + 1 : end + 1] == -1).all()
            # every later one: its predecessor, at the position after the prompt
            later = packed.predict_from[at][1:]
            np.testing.assert_array_equal(packed.input_ids[later], sequence.token_ids[:-1])
            np.testing.assert_array_equal(packed.position_ids[later], prompt + np.arange(len(later)))
            seen.append(int(index))
    assert sorted(seen) == sorted(sequences)


def test_plan_group_within_limit_computes_its_prompt_once() -> None:
    packed = plan(make_step([(50, [5, 5, 5, 5])]), 1, 100)[0]
    assert [len(row.input_ids) for row in packed] == [70]


def test_plan_group_beyond_limit_split_with_its_prompt_again() -> None:
    rows = plan(make_step([(10, [20, 20, 20])]), 1, 50)[0]
    assert sorted(len(row.input_ids) for row in rows) == [30, 50]


def test_plan_one_group_on_two_ranks_cut_to_use_both() -> None:
    shares = plan(make_step([(4, [50, 50, 50, 50])]), 2, 500)
    assert [[len(row.targets) for row in share] for share in shares] == [[100], [100]]


def test_plan_more_ranks_than_sequences_idle_rank_gets_a_row_without_targets() -> None:
    shares = plan(make_step([(4, [5, 6])]), 4, 100)
    assert {len(share) for share in shares} == {1}
    idle = [share[0] for share in shares if len(share[0].targets) == 0]
    assert len(idle) >= 2
    assert all(len(row.input_ids) == 1 for row in idle)


def test_plan_step_without_tokens_rows_without_targets() -> None:
    rng = np.random.default_rng(0)
    step = build_step([make_group(rng, "a", 4, [5, 6])], make_config(), 100)
    shares = plan(step, 2, 100)
    assert [[len(row.targets) for row in share] for share in shares] == [[0], [0]]


def test_plan_sequence_longer_than_limit_refused_with_the_number_needed() -> None:
    with pytest.raises(HeadraceError, match="use at least 35"):
        plan(make_step([(5, [30, 2])]), 1, 34)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(2, 4), st.integers(50, 200))
def test_level_same_responses_within_the_limit_and_never_slower(
    shapes: list[tuple[int, list[int]]], ranks: int, limit: int
) -> None:
    step = make_step(shapes)
    bins = assign([prompt + sum(lengths) for prompt, lengths in shapes], ranks, 1000, effort=0)
    for items in bins:
        rows = [[Part.of(step.groups[item], step.groups[item].sequences) for item in row] for row in items]
        most = max(limit, *(sum(part.tokens for part in row) for row in rows))
        even = level(rows, most)
        assert responses(even) == responses(rows)
        assert max(sum(part.tokens for part in row) for row in even) <= most
        assert max(map(cost, even)) <= max(map(cost, rows))


def responses(rows: list[list[Part]]) -> list[int]:
    return sorted(sequence.index for row in rows for part in row for sequence in part.sequences)


def cost(row: list[Part]) -> float:
    """Counted anew: what is cached in the parts must be true."""
    return sum(
        LINEAR_COST * (p + sum(lengths)) + p * p + sum(n * (n + p) for n in lengths)
        for part in row
        for p, lengths in [(len(part.group.prompt_ids), [sequence.tokens for sequence in part.sequences])]
    )


def test_level_one_whole_group_beside_an_idle_rank_halved() -> None:
    group = make_step([(4, [50, 50, 50, 50])]).groups[0]
    assert [cost(row) for row in level([[Part.of(group, group.sequences)], []], 500)] == [
        cost([Part.of(group, group.sequences[:2])])
    ] * 2


def test_layout_bimodal_groups_slowest_ranks_within_a_percent_of_even_and_of_every_prompt_once() -> None:
    """Longest-first over cut groups alone: 3 percent above every prompt once."""
    rng = np.random.default_rng(0)
    shapes = [
        (int(rng.integers(64, 257)), [int(rng.choice([256, 2048]) + rng.integers(-30, 31)) for _ in range(8)])
        for _ in range(32)
    ]
    step = make_step(shapes)
    lock_steps = layout(step, 8, 16_384)
    slowest = sum(max(map(cost, rows)) for rows in lock_steps)
    assert slowest < 1.01 * sum(cost(row) for rows in lock_steps for row in rows) / 8
    assert slowest < 1.015 * sum(cost([Part.of(group, group.sequences)]) for group in step.groups) / 8


def test_assign_log_normal_lengths_within_three_permille_of_ideal() -> None:
    """The figure of the specification: slowest rank over ideal, summed over lock-steps, 8 ranks."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(6.5, 0.8, 512), 16, 8192).astype(int).tolist()
    lock_steps = assign(sizes, 8, 16384)

    def squared(tokens: float) -> float:
        return LINEAR_COST * tokens + tokens**2

    rows = [[squared(sum(sizes[i] for i in items)) for items in lock_step] for lock_step in lock_steps]
    slowest = sum(max(lock_step) for lock_step in rows)
    assert slowest / (sum(map(sum, rows)) / 8) < 1.003


def test_packed_round_trip_equal() -> None:
    row = plan(make_step([(4, [5, 6]), (3, [2, 2])]), 1, 100)[0][0]
    back = Packed.from_bytes(row.to_bytes())
    for name, array in vars(row).items():
        np.testing.assert_array_equal(getattr(back, name), array)
        assert getattr(back, name).dtype == array.dtype


def test_packed_arrays_of_different_lengths_refused() -> None:
    row = plan(make_step([(4, [5, 6])]), 1, 100)[0][0]
    body = {name: array.tobytes() for name, array in vars(row).items()}
    with pytest.raises(WireError, match="lengths"):
        Packed.from_bytes(pack("packed", {**body, "targets": body["targets"][:-4]}))
    with pytest.raises(WireError, match="advantage is NoneType"):
        Packed.from_bytes(pack("packed", {**body, "advantage": None}))
    with pytest.raises(WireError, match="scale is 3 bytes"):
        Packed.from_bytes(pack("packed", {**body, "scale": b"abc"}))


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(1, 3), st.integers(0, 100))
def test_surviving_tokens_over_ranks_recount_every_normaliser(
    shapes: list[tuple[int, list[int]]], ranks: int, seed: int
) -> None:
    step = make_step(shapes)
    survives = np.random.default_rng(seed).random(int(step.tokens_of_sequence.sum())) > 0.4
    ends = np.cumsum(step.tokens_of_sequence)
    by_sequence = np.split(survives, ends[:-1])
    wanted = np.array([int(kept.sum()) for kept in by_sequence])
    total = np.zeros_like(wanted)
    for share in plan(step, ranks, 120):
        masks = [
            np.concatenate([by_sequence[i] for i in dict.fromkeys(row.sequence_index.tolist())] or [np.zeros(0, bool)])
            for row in share
        ]
        total += surviving_tokens(share, masks)
        prompts = share[0].prompt_of_sequence
    np.testing.assert_array_equal(total, wanted)
    np.testing.assert_array_equal(prompts, step.prompt_of_sequence)
    scale = sequence_scale(total, prompts, "token_mean")
    assert scale.max(initial=0) == (1 / wanted.sum() if wanted.sum() else 0)
