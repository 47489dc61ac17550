"""Rewards against the peers' numbers: the strict answer rule and the soft overlong punishment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from golden_cases import Case, Fields, assert_close, golden

from common.config import Config
from generator.rewards import Score, math_dapo, shape
from generator.rewards.rules import judge

FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # tolerance S of the reference: that peer computes in float32


def make_config(**sections: Any) -> Config:
    required = {
        "run": {"name": "test"},
        "model": {"path": "model"},
        "prompts": {"type": "dataset", "path": "data.jsonl"},
        "reward": {"type": "math_dapo"},
    }
    return Config.model_validate({**required, **sections})


@golden("math_dapo_scoring")
def test_strict_rule_scores_every_string_as_the_recipe(case: Case) -> None:
    """Narrow on purpose: right answers in another form are wrong here as in the published run, or results could not be
    compared. `math_verify` is the forgiving reward."""
    score = judge(make_config())
    for text, truth, theirs in zip(case.inputs["texts"], case.inputs["truths"], case.outputs, strict=True):
        found = math_dapo.predicted(text)
        assert ("[INVALID]" if found is None else found) == theirs["pred"], text
        [verdict] = score("Q", [text], {"ground_truth": truth})
        assert verdict is not None and verdict[:2] == (theirs["score"], theirs["acc"]), text


def rewards(setting: Fields, raw: float) -> list[float]:
    """Ours for one response of each length, whose raw reward is `raw`."""
    config = make_config(
        sampling={"max_response_tokens": setting["L_max"]},
        objective={"overlong_cache_tokens": setting["L_cache"]},
        learner={"micro_batch_tokens": setting["L_max"] + 10_000},
    )
    lengths: Sequence[int] = setting["lengths"]
    return shape([Score(raw, raw > 0)] * len(lengths), lengths, config)


@golden("overlong_soft_punishment")
def test_overlong_punishment_is_the_papers(case: Case) -> None:
    assert_close(rewards(case.inputs, 0.0), case.outputs["paper"])


@golden("overlong_soft_punishment")
@pytest.mark.parametrize("prefix", ["", "small_"])
def test_overlong_punishment_equals_peers_up_to_the_limit_and_stops_there(case: Case, prefix: str) -> None:
    """Above L_max we differ from verl, whose penalty keeps falling: Eq. 13 stops at -1. The peers' `factor` scales the
    penalty; the paper has none (1), nor have we, so ours is scaled here before it is compared."""
    setting = Fields(f"{case.id}.inputs.small", case.inputs["small"]) if prefix else case.inputs
    factor, limit = setting["factor"], setting["L_max"]
    penalties = rewards(setting, 0.0)
    within = [index for index, length in enumerate(setting["lengths"]) if length <= limit]
    beyond = [penalty for penalty, length in zip(penalties, setting["lengths"], strict=True) if length > limit]
    assert beyond == [-1.0] * len(beyond), "Eq. 13 stops at -1; verl keeps falling and we do not follow it"
    if f"{prefix}openrlhf_penalty" in case.outputs:
        ours = [factor * penalty for penalty in penalties]
        assert_close(ours, case.outputs[f"{prefix}openrlhf_penalty"])
    compared = 0
    for name, raw in (("penalty", 0.0), ("total_reward_correct", 1.0), ("total_reward_wrong", -1.0)):
        theirs = case.outputs.get(f"{prefix}verl_{name}")
        if theirs is None:
            continue
        totals = rewards(setting, raw)
        ours = [raw + factor * (totals[index] - raw) for index in within]
        assert_close(ours, [theirs[index] for index in within], **FLOAT32)
        compared += 1
    assert compared, f"the file has no {prefix}verl_* number"
