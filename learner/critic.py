"""The critic of `objective.advantage: {type: gae}`: its model, its optimizer, the advantages it estimates.

Runs on every rank beside the policy and sees the same packed micro-batches. What it promises: values are computed once
per batch, before its updates, on the policy's packed rows; advantages are whitened over the trained tokens of the whole
batch on all ranks; value loss, gradient and statistics do not depend on how the batch was cut. The value of a token is
that of the state before it, read from the hidden state that predicts it. Rejection (`correction.token_mask` and
`sequence_mask`) concerns the policy's loss only: a token whose ratio is off still tells what its state was worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from common.config import Config, GaeAdvantage
from learner.gae import Float64Array, Moments, estimate, moments, value_loss, whitened
from learner.logprobs import row_inputs
from learner.models import critic_model
from learner.packing import Packed
from learner.sequence import Sharing
from learner.zero import ZeroEngine, warmup_lr


@dataclass(frozen=True)
class CriticMetrics:
    """One update of the critic, over all ranks.

    Attributes:
        value_loss: mean over trained tokens, weighted as in the policy's loss.
        explained_variance: of the returns by the values before the batch.
        return_mean: over the batch's trained tokens.
        value_grad_norm: before clipping; 0 where the update was left out.
        nonfinite: whether it was, because loss or gradient were not finite.
    """

    value_loss: float
    explained_variance: float
    return_mean: float
    value_grad_norm: float
    nonfinite: bool


@dataclass(frozen=True)
class Judged:
    """What the critic made of one update's packs: `packs` carry the advantages; `old_values` and `returns` hold one
    (R,) float64 array per pack; `batch` sums up the whole batch, over all ranks."""

    packs: tuple[Packed, ...]
    old_values: tuple[Float64Array, ...]
    returns: tuple[Float64Array, ...]
    batch: Moments


class Critic:
    """Value model and optimizer of this rank."""

    def __init__(self, config: Config, advantage: GaeAdvantage, sharing: Sharing) -> None:
        self.settings, self.sharing = advantage, sharing
        self.engine = ZeroEngine(critic_model(config), advantage.optimizer, config.learner)

    def values(self, pack: Packed) -> torch.Tensor:
        """V at every token of a packed row, (R,) float32 with gradient."""
        part = self.sharing.part(pack)
        predict_from, row = row_inputs(part, self.engine.device)
        return part.whole(self.engine.module(predict_from=predict_from, **row))

    @torch.no_grad()
    def judge(self, updates: Sequence[Sequence[Packed]]) -> list[Judged]:
        """Advantages and returns of a whole batch, a list of packs per update. Every rank calls it."""
        settings, total = self.settings, Moments()
        scored = []
        for packs in updates:
            values = [self.values(pack).double().cpu().numpy() for pack in packs]
            estimates = [
                estimate(value, pack.reward, pack.sequence_index, settings.gamma, settings.gae_lambda)
                for pack, value in zip(packs, values, strict=True)
            ]
            for pack, value, estimated in zip(packs, values, estimates, strict=True):
                total += moments(estimated, value, pack.mask)
            scored.append((packs, values, estimates))
        batch = self._over_ranks(total)
        return [
            Judged(
                packs=tuple(
                    replace(pack, advantage=whitened(e.advantages, batch) if settings.whiten else e.advantages)
                    for pack, e in zip(packs, estimates, strict=True)
                ),
                old_values=tuple(values),
                returns=tuple(e.returns for e in estimates),
                batch=batch,
            )
            for packs, values, estimates in scored
        ]

    def _over_ranks(self, total: Moments) -> Moments:
        sums = torch.tensor((total if self.sharing.leads else Moments()).array(), device=self.engine.device)
        dist.all_reduce(sums)
        return Moments.from_array(sums.cpu().numpy())

    def update(self, judged: Judged, step: int) -> CriticMetrics:
        """One optimizer update; `step` counts batches, from 1, for the warm-up."""
        self.engine.set_lr(warmup_lr(self.settings.optimizer, step))
        device = self.engine.device
        total, norm = torch.zeros((), dtype=torch.float64, device=device), 0.0
        for index, pack in enumerate(judged.packs):
            values = self.values(pack)
            arrays = (judged.old_values[index], judged.returns[index], pack.mask, pack.scale)
            old, returns, mask, scale = (torch.tensor(array, device=device) for array in arrays)
            loss = value_loss(
                values, old.to(values), returns.to(values), mask, scale.to(values), self.settings.value_clip
            )
            if self.sharing.leads:
                total += loss.detach().double()
            norm = self.engine.backward(loss, values, last=index == len(judged.packs) - 1) or 0.0
        dist.all_reduce(total)
        nonfinite = not math.isfinite(norm)
        return CriticMetrics(
            value_loss=0.0 if nonfinite else float(total),
            explained_variance=0.0 if nonfinite else judged.batch.explained_variance,
            return_mean=0.0 if nonfinite else judged.batch.return_mean,
            value_grad_norm=0.0 if nonfinite else norm,
            nonfinite=nonfinite,
        )
