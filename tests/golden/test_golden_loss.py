"""The loss, its gradient, its aggregation and its correction against the peers' numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, assert_close, flat, golden, objective, run_loss

from common.config import ObjectiveConfig
from learner.batch import sequence_scale
from learner.objective import rejection_mask


def check_clipped(outputs: dict[str, Any], config: ObjectiveConfig, inputs: dict[str, Any]) -> None:
    result, gradient = run_loss(
        config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"]
    )
    valid = torch.tensor(inputs["mask"]).bool().flatten()
    assert_close(result.loss, outputs["loss"])
    assert_close(result.per_token[valid], flat(outputs["per_token_loss"])[valid])
    assert_close(gradient, outputs["dloss_dlogprob"])
    metrics = result.sums.finish(config.correction.cap)
    assert_close(metrics.clip_above + metrics.clip_below, outputs["metrics"]["actor/pg_clipfrac"], atol=1e-8)
    assert_close(metrics.clip_dual, outputs["metrics"]["actor/pg_clipfrac_lower"], atol=1e-8)


@golden("loss_clip_higher_basic")
def test_loss_clip_higher_equals_peer(case: Case) -> None:
    assert case.inputs["agg"] == "token-mean"
    check_clipped(case.outputs, objective(case.inputs), case.inputs)


@golden("loss_dual_clip_extreme")
def test_loss_extreme_ratios_with_dual_clip_equals_peer(case: Case) -> None:
    for key, outputs in case.outputs.items():
        config = objective(case.inputs, dual_clip=float(key.removeprefix("c=")))
        check_clipped(outputs, config, case.inputs)


OURS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
}  # `seq-mean-token-sum-norm`, which divides by the padded width, is not offered: packed rows have no such width


@golden("agg_modes_lengths")
def test_aggregation_different_lengths_equals_peer(case: Case) -> None:
    losses = np.array(case.inputs["per_token_loss_of_each_sequence"])
    for lengths in case.inputs["length_sets"]:
        outputs = case.outputs["lengths_" + "_".join(map(str, lengths))]
        tokens = np.array(lengths, dtype=np.int64)
        for theirs, ours in OURS.items():
            scale = sequence_scale(tokens, np.arange(len(tokens)), ours)
            assert_close((losses * tokens * scale).sum(), outputs[theirs])


@golden("agg_all_masked_microbatch")
def test_aggregation_micro_batch_without_tokens_exactly_zero(case: Case) -> None:
    """N comes from the whole step (`global_counts`); with local counts the peers return nan, which we do not follow."""
    rows = len(case.inputs["lengths"])
    for theirs, ours in OURS.items():
        result, gradient = run_loss(
            objective(case.inputs, aggregation=ours), [[-1.0]] * rows, [[-2.0]] * rows, [[1.0]] * rows, [[0]] * rows
        )
        assert result.loss.item() == case.outputs["global_counts"][theirs] == 0.0
        assert not gradient.any()


@golden("norm_microbatch_dp")
def test_normaliser_two_ranks_two_micro_batches_is_global(case: Case) -> None:
    """`verl_legacy_dp_actor` and `mean_of_rank_local_token_means` depend on the split; we do not follow them."""
    lengths = np.array(case.inputs["lengths"], dtype=np.int64)
    losses = [base * (1 + 0.1 * np.arange(n)) for base, n in zip(case.inputs["loss_row_base"], lengths, strict=True)]
    for aggregation, wanted in (
        ("token_mean", "correct_global_token_mean"),
        ("sequence_mean_token_mean", "seq_mean_token_mean_correct"),
    ):
        scale = sequence_scale(lengths, np.arange(len(lengths)), aggregation)
        contributions = [row.sum() * weight for row, weight in zip(losses, scale, strict=True)]
        assert_close(sum(contributions), case.outputs[wanted])  # a sum, however rows are dealt to ranks
    assert lengths.sum() == case.inputs["N"]


@golden("decoupled_tis")
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_truncated_weights_equal_peer(case: Case, level: str) -> None:
    """The `batch_normalized` variants are not compared: the specification divides by N, never by the mean weight."""
    inputs, outputs = case.inputs, case.outputs
    short = {"token": "token", "sequence": "seq"}[level]
    correction = {"mode": "decoupled", "level": level, "cap": inputs["is_cap"]}
    config = objective(inputs, correction=correction)
    result, gradient = run_loss(
        config,
        inputs["log_prob"],
        inputs["prox_log_prob"],
        inputs["advantages"],
        inputs["mask"],
        inputs["behav_log_prob"],
    )
    assert_close(result.weight * flat(inputs["mask"]), flat(outputs[f"w_{short}"]))
    assert_close(result.loss, outputs[f"loss_{short}_tis"])
    assert_close(gradient, outputs[f"grad_{short}_tis"])
    metrics, theirs = result.sums.finish(inputs["is_cap"]), outputs[f"metrics_{short}"]
    assert_close(metrics.effective_sample_size, theirs["rollout_is_eff_sample_size"], atol=1e-7)
    if level == "token":  # at sequence level the peer's statistics weigh rows, ours tokens
        assert_close(metrics.importance_mean, theirs["rollout_is_mean"], atol=1e-7)
        assert_close(metrics.importance_max, theirs["rollout_is_max"])


@golden("decoupled_tis")
def test_decoupled_no_correction_equals_peer(case: Case) -> None:
    inputs = case.inputs
    if "loss_no_is" not in case.outputs:
        pytest.skip("the file has no such number")
    result, _ = run_loss(
        objective(inputs), inputs["log_prob"], inputs["prox_log_prob"], inputs["advantages"], inputs["mask"]
    )
    assert_close(result.loss, case.outputs["loss_no_is"])


@golden("offpolicy_metrics")
def test_divergence_metrics_equal_peer(case: Case) -> None:
    """Perplexities and chi-squares are not compared: not among the metrics the specification lists."""
    inputs = case.inputs
    prox = inputs["prox_log_prob"]
    advantages = np.ones_like(prox).tolist()
    result, _ = run_loss(objective(inputs), prox, prox, advantages, inputs["mask"], inputs["behav_log_prob"])
    metrics = result.sums.finish(2.0)
    assert_close(metrics.kl_k1, case.outputs["kl"], atol=1e-8)
    assert_close(metrics.kl_k3, case.outputs["k3_kl"], atol=1e-8)


@golden("rejection_masks")
def test_rejection_k1_options_equal_peer_with_inverted_bounds(case: Case) -> None:
    """The peer's k1 bounds act on mu/prox, against its own documentation; ours act on prox/mu, so they are inverted
    here. Options k2, k3 and the summed k1 are not offered."""
    inputs = case.inputs
    mask = torch.tensor(inputs["mask"]).bool()
    rows = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
    compared = 0
    for key, outputs in case.outputs.items():
        option, bounds = key.split("|")
        field = {"token_k1": "token_mask", "seq_mean_k1": "sequence_mask"}.get(option)
        if field is None:
            continue
        low, high = map(float, bounds.split("_"))
        correction = objective({}, correction={field: (1 / high, 1 / low)}).correction
        kept = rejection_mask(
            flat(inputs["prox_log_prob"]), flat(inputs["behav_log_prob"]), mask.flatten(), rows, correction
        )
        assert torch.equal(kept.reshape(mask.shape).double(), torch.tensor(outputs["mask"], dtype=torch.float64)), key
        assert_close(1 - kept.sum() / mask.sum(), outputs["masked_fraction"], atol=1e-7)
        compared += 1
    assert compared


@golden("bypass_mode")
def test_bypass_clips_against_behaviour_without_weight_equals_peer(case: Case) -> None:
    """REINFORCE with a capped weight is not offered. Rejection by the summed ratio is not either, but what it leaves
    shows the denominator: the surviving tokens."""
    inputs, outputs = case.inputs, case.outputs
    config = objective(inputs, correction={"mode": "bypass"})
    behav, mask = inputs["behav_log_prob"], inputs["mask"]
    result, gradient = run_loss(config, inputs["log_prob"], behav, inputs["advantages"], mask)
    assert_close(result.loss, outputs["ppo_clip"])
    assert_close(gradient, outputs["ppo_clip_grad"])
    option, bounds = inputs["rs"].split(" ")
    assert option == "seq_sum_k1"
    low, high = (np.log(float(bound)) for bound in bounds.split("_"))
    k1 = ((np.array(behav) - np.array(inputs["log_prob"])) * np.array(mask)).sum(1, keepdims=True)
    survivors = np.where((k1 >= low) & (k1 <= high), mask, 0).tolist()
    result, gradient = run_loss(config, inputs["log_prob"], behav, inputs["advantages"], survivors)
    assert_close(result.loss, outputs["ppo_clip_with_rs"])
    assert_close(gradient, outputs["ppo_clip_with_rs_grad"])


@golden("gspo_cispo")
def test_gspo_equals_peer(case: Case) -> None:
    inputs = case.inputs
    low, high = inputs["gspo_clip"]
    config = objective(
        inputs, ratio="gspo", aggregation="sequence_mean_token_mean", clip_low=low, clip_high=high, dual_clip=None
    )
    result, _ = run_loss(config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], inputs["mask"])
    assert_close(result.loss, case.outputs["gspo"])


@golden("gspo_cispo")
def test_cispo_equals_peer(case: Case) -> None:
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


@golden("openrlhf_policy_loss")
@pytest.mark.parametrize("variant", ["plain", "dual", "tis", "icepop"])
def test_loss_openrlhf_variant_equals_peer(case: Case, variant: str) -> None:
    """`tis` agrees as long as no weight lies below its lower threshold: the peer also clamps from below, we do not.
    `icepop` divides by all tokens at the peer's and by the surviving ones here: the sums agree. `seq_mask_tis`, whose
    weight is unbounded, is not offered, and our icepop does not overflow."""
    inputs = case.inputs
    if variant not in case.outputs:
        pytest.skip("the file has no such variant")
    lower, upper = inputs.get("thresholds", [0.5, 2.0])
    behav = inputs["rollout_log_prob"]
    correction: dict[str, Any] = {"mode": "none"}
    mask = torch.tensor(inputs["mask"]).bool()
    rows = torch.arange(mask.shape[0]).repeat_interleave(mask.shape[1])
    kept = mask
    if variant in ("tis", "icepop"):
        ratio = (flat(inputs["old_log_prob"]) - flat(behav)).exp()[mask.flatten()]
        if variant == "tis" and bool((ratio < lower).any()):
            pytest.skip("a weight below the lower threshold, where the peer differs by design")
        correction = {"mode": "decoupled", "cap": upper}
    if variant == "icepop":
        correction["token_mask"] = (lower, upper)
        kept = rejection_mask(
            flat(inputs["old_log_prob"]),
            flat(behav),
            mask.flatten(),
            rows,
            objective(inputs, correction=correction).correction,
        ).reshape(mask.shape)
    config = objective(inputs, correction=correction, dual_clip=10.0 if variant == "dual" else None)
    result, _ = run_loss(
        config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], kept.int().tolist(), behav
    )
    assert_close(result.loss.item() * kept.sum() / mask.sum(), case.outputs[variant]["loss"])
