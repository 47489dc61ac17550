"""The objective beyond what the golden file pins: extremes, masks, rejection, metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import CorrectionConfig, ObjectiveConfig
from learner.objective import Tokens, policy_loss, rejection_mask
from learner.objective_metrics import MetricSums

MODES = ["decoupled", "bypass", "none"]
RATIOS = ["token", "gspo", "cispo"]


def make_tokens(count: int = 12, sequences: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)

    behav = normal(0.5, -2.0)
    index = torch.arange(count) * sequences // max(count, 1)
    return Tokens(
        logp=(behav + normal(0.3)).requires_grad_(),
        prox_logp=behav + normal(0.2),
        behav_logp=behav,
        advantage=torch.randn(sequences, generator=generator, dtype=torch.float64).to(dtype)[index],
        mask=torch.rand(count, generator=generator) > 0.2,
        sequence_index=index,
        scale=torch.full((count,), 1 / max(count, 1), dtype=dtype),
        entropy=normal(0.1, 1.0),
    )


def make_objective(mode: str = "decoupled", **fields: Any) -> ObjectiveConfig:
    correction = {"mode": mode, **fields.pop("correction", {})}
    return ObjectiveConfig.model_validate({"correction": correction, **fields})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_log_ratios_of_ten_thousand_finite_with_bounded_gradient(
    mode: str, ratio: str, level: str, dtype: torch.dtype
) -> None:
    extremes = torch.tensor([1e4, -1e4, 0.0], dtype=dtype)
    grid = torch.cartesian_prod(extremes, extremes, torch.tensor([-2.0, 2.0], dtype=dtype))
    behav = torch.full((len(grid),), -1.0, dtype=dtype)
    logp = (behav + grid[:, 0] + grid[:, 1]).requires_grad_()
    tokens = Tokens(
        logp=logp,
        prox_logp=behav + grid[:, 1],
        behav_logp=behav,
        advantage=grid[:, 2],
        mask=torch.ones(len(grid), dtype=torch.bool),
        sequence_index=torch.arange(len(grid)),
        scale=torch.ones(len(grid), dtype=dtype),
        entropy=torch.zeros(len(grid), dtype=dtype),
    )
    config = make_objective(mode, ratio=ratio, correction={"level": level})
    result = policy_loss(tokens, config)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logp.grad is not None
    # |d l| <= |A| * max(r where it is not clipped) * w, and r is at most the dual clip's 10, w at most 2
    assert logp.grad.abs().max() <= 2.0 * 10.0 * 2.0
    assert all(np.isfinite(value) for value in vars(result.sums.finish(2.0)).values())


LOGP = st.floats(-(2.0**127), 0, width=32) | st.floats(-30, 0, width=32)  # as far as finite float32 reaches


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(LOGP, LOGP, LOGP, st.floats(-4, 4, width=32)), min_size=1, max_size=8),
    sequences=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    ratio=st.sampled_from(["token", "gspo"]),
    level=st.sampled_from(["token", "sequence"]),
)
def test_loss_any_finite_log_probabilities_finite_with_bounded_gradient(
    rows: list[tuple[float, float, float, float]], sequences: int, mode: str, ratio: str, level: str
) -> None:
    logp, prox, behav, advantage = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    index = torch.arange(len(rows)) * sequences // len(rows)
    tokens = Tokens(
        logp=logp.clone().requires_grad_(),
        prox_logp=prox,
        behav_logp=behav,
        advantage=advantage,
        mask=torch.ones(len(rows), dtype=torch.bool),
        sequence_index=index,
        scale=torch.full((len(rows),), 1 / len(rows)),
        entropy=torch.zeros(len(rows)),
    )
    result = policy_loss(tokens, make_objective(mode, ratio=ratio, correction={"level": level}))
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert tokens.logp.grad is not None
    # |A| is at most 4, r where it is not clipped at most 10 (dual clip), w at most 2; gspo spreads one r over its row
    assert tokens.logp.grad.abs().max() <= 4.0 * 10.0 * 2.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_loss_masked_tokens_hold_nan_contribute_exactly_zero(mode: str, ratio: str) -> None:
    tokens = make_tokens()
    config = make_objective(mode, ratio=ratio, correction={"level": "sequence"})
    kept = tokens.mask

    def poison(value: torch.Tensor) -> torch.Tensor:
        return torch.where(kept, value.detach(), torch.nan)

    logp = poison(tokens.logp).requires_grad_()
    poisoned = replace(
        tokens,
        logp=logp,
        prox_logp=poison(tokens.prox_logp),
        behav_logp=poison(tokens.behav_logp),
        entropy=poison(tokens.entropy),
    )
    clean, dirty = policy_loss(tokens, config), policy_loss(poisoned, config)
    clean.loss.backward()
    dirty.loss.backward()
    assert logp.grad is not None
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(logp.grad, tokens.logp.grad)
    assert not logp.grad[~kept].any()
    assert clean.sums.finish(2.0) == dirty.sums.finish(2.0)


@pytest.mark.parametrize("count", [0, 6])
def test_loss_nothing_to_train_zero_and_connected(count: int) -> None:
    tokens = make_tokens(count)
    tokens = replace(tokens, mask=torch.zeros(count, dtype=torch.bool), scale=torch.zeros(count, dtype=torch.float64))
    result = policy_loss(tokens, make_objective(correction={"level": "sequence"}))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert tokens.logp.grad is not None
    assert not tokens.logp.grad.any()
    metrics = result.sums.finish(2.0)
    assert metrics.tokens == 0
    assert metrics.masked_share == (1.0 if count else 0.0)
    assert all(np.isfinite(value) for value in vars(metrics).values())


@pytest.mark.parametrize(
    ("advantage", "difference", "gradient"),
    [
        (1.0, 0.24, -np.exp(0.24)),  # 1.271: inside
        (1.0, 0.25, 0.0),  # 1.284 > 1.28
        (1.0, -5.0, -np.exp(-5.0)),  # far below, but A > 0 is not clipped there
        (-1.0, -0.22, np.exp(-0.22)),  # 0.803: inside
        (-1.0, -0.23, 0.0),  # 0.794 < 0.8
        (-1.0, 2.0, np.exp(2.0)),  # far above, but A < 0 is not clipped there
        (-1.0, 2.4, 0.0),  # 11.02 > dual clip 10
        (1.0, -21.0, 0.0),  # the clamp
    ],
)
def test_gradient_around_each_clip_zero_exactly_outside(advantage: float, difference: float, gradient: float) -> None:
    one = torch.ones(1, dtype=torch.float64)
    logp = (-3.0 * one).requires_grad_()
    anchor = logp.detach() - difference
    tokens = Tokens(logp, anchor, anchor, advantage * one, one.bool(), one.long() * 0, one, one)
    policy_loss(tokens, make_objective("none")).loss.backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(gradient, rel=1e-12)


def test_loss_dual_clip_off_unbounded_above() -> None:
    one = torch.ones(1, dtype=torch.float64)
    tokens = Tokens(one * 3, one * 0, one * 0, -one, one.bool(), one.long() * 0, one, one)
    assert policy_loss(tokens, make_objective("none", dual_clip=None)).loss.item() == pytest.approx(np.exp(3))


def test_weight_never_carries_a_gradient() -> None:
    tokens = make_tokens()
    prox = tokens.prox_logp.clone().requires_grad_()
    policy_loss(replace(tokens, prox_logp=prox), make_objective()).loss.backward()
    assert prox.grad is None


def test_rejection_bounds_act_on_prox_over_mu_inclusively() -> None:
    ratios = torch.tensor([0.4, 0.5, 1.0, 1.2, 1.3], dtype=torch.float64)
    behav = torch.zeros(5, dtype=torch.float64)
    mask = torch.ones(5, dtype=torch.bool)
    kept = rejection_mask(ratios.log(), behav, mask, torch.arange(5), CorrectionConfig(token_mask=(0.5, 1.2)))
    assert kept.tolist() == [False, True, True, True, False]


def test_rejection_of_sequences_by_geometric_mean_of_counted_tokens() -> None:
    prox = torch.tensor([1.0, -1.0, 0.5, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    index = torch.tensor([0, 0, 1, 1])
    kept = rejection_mask(prox, torch.zeros(4).double(), mask, index, CorrectionConfig(sequence_mask=(0.9, 1.1)))
    assert kept.tolist() == [True, True, False, False]


def test_rejection_without_bands_changes_nothing() -> None:
    tokens = make_tokens()
    kept = rejection_mask(
        tokens.prox_logp, tokens.behav_logp, tokens.mask, tokens.sequence_index, CorrectionConfig()
    )
    assert torch.equal(kept, tokens.mask)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 1000))
def test_metrics_added_over_micro_batches_equal_one_batch(cuts: list[int], seed: int) -> None:
    tokens = make_tokens(sum(cuts), max(sum(cuts), 1), seed)  # a sequence a token: may be cut anywhere
    config = make_objective()
    whole = policy_loss(tokens, config).sums.finish(2.0)
    sums, first = MetricSums.zero(), 0
    for cut in cuts:
        part = replace(tokens, **{name: value[first : first + cut] for name, value in vars(tokens).items()})
        sums, first = sums + policy_loss(part, config).sums, first + cut
    assert vars(sums.finish(2.0)) == pytest.approx(vars(whole), rel=1e-9, abs=1e-12)


def test_metrics_percentile_of_weights_within_a_bin() -> None:
    count = 1000
    tokens = make_tokens(count, count)
    weights = torch.linspace(0.001, 1.5, count, dtype=torch.float64)
    tokens = replace(tokens, prox_logp=tokens.behav_logp + weights.log(), mask=torch.ones(count, dtype=torch.bool))
    metrics = policy_loss(tokens, make_objective(correction={"cap": 2.0})).sums.finish(2.0)
    assert metrics.weight_p99 == pytest.approx(np.percentile(weights.numpy(), 99), abs=2 * 2.0 / 1024)
    assert metrics.weight_at_cap == 0.0
    capped = policy_loss(tokens, make_objective(correction={"cap": 0.75})).sums.finish(0.75)
    assert capped.weight_max == capped.weight_p99 == 0.75
    assert capped.weight_at_cap == pytest.approx(0.5, abs=0.01)
    assert capped.importance_max == pytest.approx(1.5)
