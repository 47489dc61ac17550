"""The loss, its gradient and its aggregation against the peers' numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from golden_cases import Case, assert_close, by_number, flat, golden, objective, run_loss, run_token_losses

from common.config import ObjectiveConfig
from learner.batch import sequence_scale


def check_clipped(outputs: dict[str, Any], config: ObjectiveConfig, inputs: dict[str, Any]) -> None:
    args = (inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"])
    result, gradient = run_loss(config, *args)
    valid = torch.tensor(inputs["mask"]).bool().flatten()
    assert_close(result.loss, outputs["loss"])
    assert_close(result.per_token[valid], flat(outputs["per_token_loss"])[valid])
    assert_close(gradient, outputs["dloss_dlogprob"])
    metrics, theirs = result.sums.finish(config.correction.cap), outputs["metrics"]
    assert_close(metrics.clip_above + metrics.clip_below, theirs["actor/pg_clipfrac"], atol=1e-8)
    assert_close(metrics.clip_dual, theirs["actor/pg_clipfrac_lower"], atol=1e-8)


@golden("loss_clip_higher_basic")
def test_loss_clip_higher_equals_peer(case: Case) -> None:
    assert case.inputs["agg"] == "token-mean"
    check_clipped(case.outputs, objective(case.inputs), case.inputs)


@golden("loss_dual_clip_extreme")
def test_loss_extreme_ratios_with_dual_clip_equals_peer(case: Case) -> None:
    """The dual clip and the clamp of the log-ratio at +-20 are the recipe's, not the paper's; the former can be off."""
    by_clip = by_number(case.outputs, "c=")
    assert by_clip
    for clip, outputs in by_clip.items():
        check_clipped(outputs, objective(case.inputs, dual_clip=clip), case.inputs)


OURS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
}  # `seq-mean-token-sum-norm`, which divides by the padded width, is not offered: packed rows have no such width


@golden("agg_modes_lengths")
def test_aggregation_different_lengths_equals_peer(case: Case) -> None:
    inputs, width = case.inputs, np.arange(case.inputs["T"])
    losses = np.array(inputs["per_token_loss_of_each_sequence"])[:, None].repeat(len(width), 1)
    for lengths in inputs["length_sets"]:
        mask = (width < np.array(lengths)[:, None]).tolist()
        outputs = case.outputs["lengths_" + "_".join(map(str, lengths))]
        for theirs, ours in OURS.items():
            assert_close(run_token_losses(losses, mask, ours)[0].loss, outputs[theirs])


@golden("agg_all_masked_microbatch")
def test_aggregation_micro_batch_without_tokens_exactly_zero(case: Case) -> None:
    """N comes from the whole step (`global_counts`); with `local_counts` the peers return nan, which we do not follow:
    a micro-batch has no normaliser of its own here."""
    masked = len(case.inputs["lengths"])
    assert not any(case.inputs["lengths"])
    others = np.full(int(case.inputs["global_batch_size"]), 0, dtype=np.int64)
    others[0] = case.inputs["batch_num_tokens"]
    tokens = np.concatenate([np.zeros(masked, dtype=np.int64), others])
    for theirs, ours in OURS.items():
        scale = sequence_scale(tokens, np.arange(len(tokens)), ours)[:masked]
        result, gradient = run_token_losses([[3.0, np.nan]] * masked, [[0, 0]] * masked, ours, scale)
        assert result.loss.item() == case.outputs["global_counts"][theirs] == 0.0
        assert not gradient.any()


@golden("norm_microbatch_dp")
def test_normaliser_over_ranks_and_micro_batches_is_global(case: Case) -> None:
    """`verl_legacy_dp_actor` and `mean_of_rank_local_token_means` depend on the split. We do not follow them: the
    gradient must not depend on how a step is cut."""
    inputs, outputs = case.inputs, case.outputs
    lengths = np.array(inputs["lengths"], dtype=np.int64)
    positions = np.arange(max(lengths))
    losses = np.array(inputs["loss_row_base"])[:, None] * (1 + 0.1 * positions)
    mask = (positions < lengths[:, None]).astype(int)
    ranks = [re.findall(r"\[([\d, ]*)\]", rank) for rank in inputs["split"].split(";")]
    micro_batches = [[int(row) for row in rows.split(",")] for rank in ranks for rows in rank]
    assert len(ranks) == inputs["dp_size"] and len(micro_batches) == inputs["dp_size"] * inputs["gas"]
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    assert lengths.sum() == inputs["N"]
    for aggregation, wanted in (
        ("token_mean", ("correct_global_token_mean", "verl_engine_path", "openrlhf_deepspeed_path")),
        ("sequence_mean_token_mean", ("seq_mean_token_mean_correct", "seq_mean_token_mean_engine")),
    ):
        scale = sequence_scale(lengths, np.arange(len(lengths)), aggregation)
        whole, gradient = run_token_losses(losses, mask.tolist(), aggregation)
        parts = [run_token_losses(losses[cut], mask[cut].tolist(), aggregation, scale[cut]) for cut in micro_batches]
        for name in wanted:
            assert_close(sum(part.loss for part, _ in parts), outputs[name])
            assert_close(whole.loss, outputs[name])
        for rows, (_, part_gradient) in zip(micro_batches, parts, strict=True):
            assert_close(part_gradient, gradient[rows])


@golden("gspo_cispo")
def test_gspo_equals_peer(case: Case) -> None:
    """Off by default; outside the paper."""
    inputs = case.inputs
    low, high = inputs["gspo_clip"]
    config = objective(
        inputs, ratio="gspo", aggregation="sequence_mean_token_mean", clip_low=low, clip_high=high, dual_clip=None
    )
    result, _ = run_loss(config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"])
    assert_close(result.loss, case.outputs["gspo"])


@golden("gspo_cispo")
def test_cispo_equals_peer(case: Case) -> None:
    """Off by default; outside the paper."""
    inputs, outputs = case.inputs, case.outputs
    low, high = inputs["cispo_clip"]
    config = objective(inputs, ratio="cispo", clip_low=low, clip_high=high)
    result, gradient = run_loss(
        config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"]
    )
    metrics = result.sums.finish(2.0)
    assert_close(result.loss, outputs["cispo"])
    assert_close(gradient, outputs["cispo_grad"])
    assert_close(metrics.clip_above + metrics.clip_below, outputs["cispo_clipfrac"], atol=1e-8)
