"""The off-policy correction against the peers' numbers: weights, divergences, rejection, the two-policy form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Fields, assert_close, flat, golden, objective, row_index, run_loss

from common.config import CorrectionConfig
from learner.objective import rejection_mask


@golden("decoupled_tis")
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_truncated_weights_equal_peer(case: Case, level: str) -> None:
    """Weights are truncated from above only, and the denominator stays N: the `batch_normalized` variants, which divide
    by the mean weight, are not offered. The peer's effective sample size and its statistics at sequence level are of
    other numbers than ours (weights also clamped from below at 1/C; rows, not tokens): compared where they agree."""
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
    used = result.weight[flat(inputs["mask"]).bool()]
    if inputs["is_cap"] >= 1 and bool((used >= 1 / inputs["is_cap"]).all()):
        assert_close(metrics.effective_sample_size, theirs["rollout_is_eff_sample_size"], atol=1e-7)
    if level == "token":
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


def bands(options: str, thresholds: str) -> CorrectionConfig | None:
    """Our bands on prox/mu that keep what the peer's options keep; None where some option is not offered."""
    fields: dict[str, tuple[float, float]] = {}
    bounds = thresholds.split(",")
    names = options.split(",")
    for option, bound in zip(names, bounds * len(names) if len(bounds) == 1 else bounds, strict=True):
        field = {"token_k1": "token_mask", "token_k2": "token_mask", "seq_mean_k1": "sequence_mask"}.get(option)
        if field is None or field in fields:
            return None
        numbers = [float(number) for number in bound.split("_")]
        if option == "token_k2":  # d^2/2 within the threshold
            reach = math.exp(math.sqrt(2 * numbers[0]))
            fields[field] = (1 / reach, reach)
        else:  # the peer's bounds are on mu/prox; a single one is the upper
            fields[field] = (1 / numbers[-1], 1 / numbers[0] if len(numbers) == 2 else numbers[-1])
        if not fields[field][0] <= 1 <= fields[field][1]:
            return None
    return CorrectionConfig.model_validate(fields)


def survivors(inputs: Fields, learner: str, behav: str, correction: CorrectionConfig) -> torch.Tensor:
    """(rows, positions) bool: what `rejection_mask` keeps."""
    mask = torch.tensor(inputs["mask"]).bool()
    kept = rejection_mask(
        flat(inputs[learner]), flat(inputs[behav]), mask.flatten(), row_index(inputs["mask"]), correction
    )
    return kept.reshape(mask.shape)


@golden("rejection_masks")
def test_rejection_equals_peer_with_inverted_bounds(case: Case) -> None:
    """The peer's k1 bounds act on mu/prox, against its own documentation; ours act on prox/mu, so they are inverted
    here. Options that are no band on a token's or a sequence's mean ratio (k3, sums, maxima) are not offered."""
    compared = 0
    for key, outputs in case.outputs.items():
        correction = bands(*key.split("|"))
        if correction is None:
            continue
        kept = survivors(case.inputs, "prox_log_prob", "behav_log_prob", correction)
        assert kept.double().tolist() == outputs["mask"], key
        valid = torch.tensor(case.inputs["mask"]).bool()
        assert_close(1 - kept.sum() / valid.sum(), outputs["masked_fraction"], atol=1e-7)
        assert_close((valid & ~kept).any(1).double().mean(), outputs["seq_masked_fraction"], atol=1e-7)
        compared += 1
    assert compared, f"none of {', '.join(case.outputs)} is offered here"


@golden("rejection_masks")
def test_rejection_bounds_act_on_prox_over_mu_unlike_the_peer(case: Case) -> None:
    """The same numbers as bounds keep other tokens wherever the bounds are not symmetric (`token_k1|0.25_1.2`): a
    configured [low, high] means pi_prox / pi_mu here, as the peer's documentation says and its code does not."""
    ratio = np.exp(np.array(case.inputs["prox_log_prob"]) - np.array(case.inputs["behav_log_prob"]))
    for key in case.outputs:
        option, bound = key.split("|")
        if option == "token_k1" and "_" in bound:
            low, high = map(float, bound.split("_"))
            kept = survivors(
                case.inputs, "prox_log_prob", "behav_log_prob", CorrectionConfig(token_mask=(low, high))
            )
            assert kept.tolist() == ((ratio >= low) & (ratio <= high) & (np.array(case.inputs["mask"]) > 0)).tolist()


@golden("bypass_mode")
def test_bypass_clips_against_behaviour_without_weight_equals_peer(case: Case) -> None:
    """A second weight would count the drift twice. Rejection under `bypass` is not offered (there prox is mu), but what
    the peer's leaves shows the denominator: the surviving tokens."""
    inputs, outputs = case.inputs, case.outputs
    config = objective(inputs, correction={"mode": "bypass"})
    behav, mask = inputs["behav_log_prob"], inputs["mask"]
    result, gradient = run_loss(config, inputs["log_prob"], behav, inputs["advantages"], mask)
    assert_close(result.loss, outputs["ppo_clip"])
    assert_close(gradient, outputs["ppo_clip_grad"])
    metrics, theirs = result.sums.finish(2.0), outputs["ppo_clip_metrics"]
    assert_close(metrics.clip_above + metrics.clip_below, theirs["actor/pg_clipfrac"], atol=1e-8)
    assert_close(metrics.clip_dual, theirs["actor/pg_clipfrac_lower"], atol=1e-8)
    assert_close(metrics.kl_k1, theirs["actor/ppo_kl"], atol=1e-8)
    option, bounds = inputs["rs"].split(" ")
    if option == "seq_sum_k1":
        low, high = (np.log(float(bound)) for bound in bounds.split("_"))
        k1 = ((np.array(behav) - np.array(inputs["log_prob"])) * np.array(mask)).sum(1, keepdims=True)
        kept = np.where((k1 >= low) & (k1 <= high), mask, 0).tolist()
    else:
        correction = bands(option, bounds)
        assert correction is not None, f"rejection by {option} is not offered"
        kept = survivors(inputs, "log_prob", "behav_log_prob", correction).int().tolist()
    result, gradient = run_loss(config, inputs["log_prob"], behav, inputs["advantages"], kept)
    assert_close(result.loss, outputs["ppo_clip_with_rs"])
    assert_close(gradient, outputs["ppo_clip_with_rs_grad"])


@golden("bypass_mode")
def test_bypass_reinforce_with_capped_weight_equals_peer(case: Case) -> None:
    """Not offered by that name; it is CISPO against mu with the bounds [0, C]."""
    inputs, outputs = case.inputs, case.outputs
    config = objective(
        inputs, ratio="cispo", clip_low=1.0, clip_high=inputs["is_cap"] - 1, correction={"mode": "bypass"}
    )
    behav = inputs["behav_log_prob"]
    result, gradient = run_loss(config, inputs["log_prob"], behav, inputs["advantages"], inputs["mask"])
    assert_close(result.loss, outputs["reinforce_token_tis"])
    assert_close(gradient, outputs["reinforce_grad"])


UNCAPPED = math.exp(20)  # where the log-ratio is clamped
FIXED = {"thresholds": [0.5, 2.0], "dual_clip": 10.0}  # of the reference, where the file does not say


@golden("openrlhf_policy_loss")
@pytest.mark.parametrize("variant", ["plain", "dual", "tis", "icepop", "seq_mask_tis"])
def test_loss_openrlhf_variant_equals_peer(case: Case, variant: str) -> None:
    """Rejected tokens leave our denominator and stay in the peer's: the sums are compared. Two differences by design.
    The peer's `tis` also clamps weights from below; ours truncates from above only, and where a weight is that small
    the test shows that instead. Its `seq_mask_tis` never truncates: it is compared with our cap out of the way."""
    inputs, theirs = case.inputs, case.outputs[variant]
    lower, upper = inputs.get("thresholds", FIXED["thresholds"])
    correction: dict[str, Any] = {
        "plain": {"mode": "none"},
        "dual": {"mode": "none"},
        "tis": {"mode": "decoupled", "cap": upper},
        "icepop": {"mode": "decoupled", "cap": upper, "token_mask": (lower, upper)},
        "seq_mask_tis": {"mode": "decoupled", "cap": UNCAPPED, "sequence_mask": (lower, upper)},
    }[variant]
    low, high = inputs["clip"]
    dual = inputs.get("dual_clip", FIXED["dual_clip"]) if variant == "dual" else None
    config = objective(inputs, correction=correction, dual_clip=dual, clip_low=low, clip_high=high)
    kept = survivors(inputs, "old_log_prob", "rollout_log_prob", config.correction)
    old, behav = inputs["old_log_prob"], inputs["rollout_log_prob"]
    result, _ = run_loss(config, inputs["log_prob"], old, inputs["advantages"], kept.int().tolist(), behav)
    small = ((flat(old) - flat(behav)).exp() < lower) & kept.flatten()
    if variant == "tis" and bool(small.any()):
        assert bool((result.weight[small] < lower).all()), "truncation is from above only"
    else:
        assert_close(result.loss.item() * kept.sum() / np.sum(inputs["mask"]), theirs["loss"])
    whole, _ = run_loss(
        objective(inputs, clip_low=low, clip_high=high), inputs["log_prob"], old, inputs["advantages"], inputs["mask"],
        behav,
    )  # fmt: skip
    metrics = whole.sums.finish(2.0)
    assert_close(metrics.clip_above + metrics.clip_below, theirs["clip_ratio"], atol=1e-8)
    if theirs["vllm_kl"] is not None:
        assert_close(metrics.kl_k1, theirs["vllm_kl"], atol=1e-8)
    bypass = objective(inputs, correction={"mode": "bypass"})
    current, _ = run_loss(bypass, inputs["log_prob"], old, inputs["advantages"], inputs["mask"])
    assert_close(current.sums.finish(2.0).kl_k1, theirs["ppo_kl"], atol=1e-8)


@golden("openrlhf_policy_loss")
def test_loss_does_not_overflow_where_the_peers_icepop_does(case: Case) -> None:
    """`icepop_overflow_float32` is nan: exp() of a log-ratio of 120 is infinite, and infinite times zero is nan. We
    clamp the log-ratio first and replace masked entries instead of multiplying them."""
    assert case.outputs["icepop_overflow_float32"] == "nan"
    inputs = case.inputs
    behav = np.full(np.shape(inputs["mask"]), -120.0).tolist()
    config = objective(inputs, correction={"mode": "decoupled", "token_mask": FIXED["thresholds"]})
    for mask in (inputs["mask"], np.zeros_like(inputs["mask"]).tolist()):
        result, gradient = run_loss(
            config, inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], mask, behav, dtype=torch.float32
        )
        assert torch.isfinite(result.loss) and bool(torch.isfinite(gradient).all())
