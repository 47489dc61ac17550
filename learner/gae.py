"""Generalised advantage estimation and the critic's loss, as pure functions over flat arrays.

As in `learner.objective`, arrays have one entry per response token, whole responses one after the other, and the loss
of an update is the plain sum over micro-batches and ranks. GAE runs through masked tokens: they are steps of the
trajectory like any other, and only lose their place in losses and statistics. Sources: GAE, Schulman et al. 2016 (arXiv
1506.02438); the clipped value loss is implementation practice around PPO (Schulman et al. 2017, arXiv 1707.06347).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Float64Array = NDArray[np.float64]
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class Estimate:
    """What GAE makes of some responses: `advantages` and `returns` (advantage + value), (tokens,) float64, no unit."""

    advantages: Float64Array
    returns: Float64Array


@dataclass(frozen=True)
class Moments:
    """Sums over trained tokens, to be added over micro-batches and ranks (`array`, `from_array`)."""

    tokens: float = 0.0
    advantage: float = 0.0
    advantage_squared: float = 0.0
    returned: float = 0.0
    returned_squared: float = 0.0
    error: float = 0.0
    error_squared: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        return Moments.from_array(self.array() + other.array())

    def array(self) -> Float64Array:
        """(fields,) float64."""
        return np.array(list(vars(self).values()), dtype=np.float64)

    @classmethod
    def from_array(cls, values: Float64Array) -> Moments:
        return cls(*(float(value) for value in values))

    @property
    def advantage_mean(self) -> float:
        return self.advantage / max(self.tokens, 1.0)

    @property
    def advantage_std(self) -> float:
        return _variance(self.advantage, self.advantage_squared, self.tokens) ** 0.5

    @property
    def return_mean(self) -> float:
        return self.returned / max(self.tokens, 1.0)

    @property
    def explained_variance(self) -> float:
        """1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one; 0 where returns are all
        equal."""
        returns = _variance(self.returned, self.returned_squared, self.tokens)
        if returns * self.tokens <= 1e-12 * self.returned_squared:  # rounding only
            return 0.0
        return 1.0 - _variance(self.error, self.error_squared, self.tokens) / returns


def _variance(total: float, squared: float, count: float) -> float:
    """Population variance of `count` numbers from their sum and sum of squares, at least 0."""
    return max(squared / max(count, 1.0) - (total / max(count, 1.0)) ** 2, 0.0)


def estimate(
    values: Float64Array, rewards: Float64Array, sequence_index: NDArray[np.integer[Any]], gamma: float, lam: float
) -> Estimate:
    """GAE(gamma, lambda) of every token (arXiv 1506.02438, Eq. 11 and 16), a response at a time.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; beyond a response's last token V and A
    are 0.

    Args:
        values: (tokens,) V of the state before the token, that is, of prompt and response up to its predecessor.
        rewards: (tokens,) r_t; an outcome's reward stands at its response's last token.
        sequence_index: (tokens,) which response a token belongs to; equal numbers stand together.
        gamma, lam: discount and trace weight per token, 0 to 1.
    """
    advantages = np.empty(len(values), dtype=np.float64)
    following, trace = 0.0, 0.0
    for t in range(len(values) - 1, -1, -1):
        if t + 1 == len(values) or sequence_index[t] != sequence_index[t + 1]:
            following, trace = 0.0, 0.0
        trace = rewards[t] + gamma * following - values[t] + gamma * lam * trace
        following = values[t]
        advantages[t] = trace
    return Estimate(advantages, advantages + values)


def moments(estimated: Estimate, values: Float64Array, mask: NDArray[np.bool_]) -> Moments:
    """Sums over the tokens of `mask`; `values` are those the estimate was made from."""
    sums = [float(mask.sum())]
    for numbers in (estimated.advantages, estimated.returns, estimated.returns - values):
        sums += [float(numbers[mask].sum()), float(np.square(numbers[mask]).sum())]
    return Moments(*sums)


def whitened(advantages: Float64Array, total: Moments) -> Float64Array:
    """Advantages with the batch's mean taken off and divided by its standard deviation + 1e-8 (over n)."""
    return (advantages - total.advantage_mean) / (total.advantage_std + WHITEN_EPSILON)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, scale: Tensor, clip: float | None
) -> Tensor:
    """sum(mask * scale * 0.5 * max((V - R)^2, (V_clip - R)^2)), V_clip = clip(V, V_old - clip, V_old + clip).

    Args:
        values: (tokens,) with gradient.
        old_values: (tokens,) values before the batch's first update.
        returns: (tokens,) what the values should be.
        mask: (tokens,) bool, True where the token trains.
        scale: (tokens,) weight of the token's loss (`learner.batch.sequence_scale`).
        clip: how far a value may move and still lower its loss; None: off, plainly 0.5 (V - R)^2.

    Returns:
        A scalar, connected to the graph even where no token trains.
    """
    # Masked before anything is computed with it, so that nothing a masked token holds survives in the gradient.
    error = torch.where(mask, values - returns, 0.0).square()
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        error = torch.maximum(error, torch.where(mask, near - returns, 0.0).square())
    return (0.5 * error * scale).sum()
