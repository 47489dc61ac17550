"""GAE by hand and by its definition, the value loss, and the statistics over a cut batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.gae import Moments, estimate, moments, value_loss, whitened


def naive(values: np.ndarray, rewards: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, term by term, for one response."""
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    return np.array([
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(values)))
        for t in range(len(values))
    ])  # fmt: skip


def test_estimate_by_hand() -> None:
    values, rewards = np.array([0.5, 0.25, 1.0]), np.array([0.0, 0.0, 2.0])
    result = estimate(values, rewards, np.zeros(3, dtype=np.int32), gamma=0.5, lam=0.5)
    # deltas: 0.5 * 0.25 - 0.5 = -0.375; 0.5 * 1 - 0.25 = 0.25; 2 - 1 = 1. Trace 0.25.
    np.testing.assert_array_equal(result.advantages, [-0.375 + 0.25 * (0.25 + 0.25 * 1.0), 0.25 + 0.25 * 1.0, 1.0])
    np.testing.assert_array_equal(result.returns, result.advantages + values)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0.1, 1), st.floats(0, 1), st.integers(0, 99))
def test_estimate_of_several_responses_equals_definition(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    index = np.repeat(rng.permutation(len(lengths)), lengths)
    values, rewards = rng.normal(size=len(index)), rng.normal(size=len(index))
    ends = np.cumsum(lengths)[:-1]
    wanted = [naive(v, r, gamma, lam) for v, r in zip(np.split(values, ends), np.split(rewards, ends), strict=True)]
    result = estimate(values, rewards, index, gamma, lam)
    np.testing.assert_allclose(result.advantages, np.concatenate(wanted), rtol=1e-12, atol=1e-12)


def test_estimate_lambda_one_undiscounted_returns_are_the_reward() -> None:
    values, rewards = np.random.default_rng(0).normal(size=6), np.array([0, 0, 0, 0, 0, 0.7])
    np.testing.assert_allclose(estimate(values, rewards, np.zeros(6, int), 1.0, 1.0).returns, 0.7)


def test_estimate_without_tokens_is_empty() -> None:
    assert estimate(np.empty(0), np.empty(0), np.empty(0, int), 1.0, 0.95).advantages.shape == (0,)


def test_moments_over_cuts_give_statistics_of_trained_tokens_only() -> None:
    rng = np.random.default_rng(1)
    values, rewards, mask = rng.normal(size=20), rng.normal(size=20), rng.random(20) > 0.3
    result = estimate(values, rewards, np.arange(20) // 4, 1.0, 0.95)
    parts = [slice(0, 8), slice(8, 8), slice(8, 20)]
    total = sum((moments(type(result)(result.advantages[p], result.returns[p]), values[p], mask[p]) for p in parts),
                Moments())  # fmt: skip
    white = whitened(result.advantages, total)
    assert white[mask].mean() == pytest.approx(0, abs=1e-12)
    assert white[mask].std() == pytest.approx(1, abs=1e-6)
    assert total.return_mean == pytest.approx(result.returns[mask].mean())
    explained = 1 - (result.returns - values)[mask].var() / result.returns[mask].var()
    assert total.explained_variance == pytest.approx(explained)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_moments_of_equal_or_no_numbers_are_finite(count: int) -> None:
    numbers = np.full(count, 0.1)
    total = moments(estimate(np.zeros(count), numbers, np.arange(count), 1.0, 1.0), np.zeros(count), numbers > 0)
    assert total.explained_variance == 0.0
    np.testing.assert_allclose(whitened(numbers, total), 0.0, atol=1e-6)


def test_value_loss_clipped_and_masked_by_hand() -> None:
    values = torch.tensor([0.9, 2.0, 0.2, torch.nan], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 1.9, 0.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    mask, scale = torch.tensor([True, True, True, False]), torch.tensor([0.5, 0.25, 1.0, 1.0], dtype=torch.float64)
    loss = value_loss(values, old, returns, mask, scale, 0.5)
    # The first moved by more than 0.5: its clipped value is 0.5, whose error is larger.
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.25 + 0.25 * 4.0 + 0.64))
    loss.backward()
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), [0.0, 0.25 * 2.0, -0.8, 0.0])
    plain = value_loss(values.detach()[:3], old[:3], returns[:3], mask[:3], scale[:3], None)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 0.01 + 0.25 * 4.0 + 0.64))


def test_value_loss_no_token_zero_and_connected() -> None:
    values = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    loss = value_loss(values, empty, empty, empty.bool(), empty, 0.5)
    loss.backward()
    assert loss.item() == 0.0 and values.grad is not None
