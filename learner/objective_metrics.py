"""What the objective measures: sums that can be added over micro-batches and ranks, then finished into metrics.

Promises: measuring carries no gradient and does not make the device wait; `finish` over the sums of all micro-batches
and ranks gives the numbers that one big micro-batch would have given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOTALS = (
    "loss", "present", "tokens", "weight", "weight_squared", "at_cap", "importance", "k1", "k3",
    "clip_above", "clip_below", "clip_dual", "entropy", "probability", "probability_gap",
    "kl_reference",
)  # fmt: skip
_BINS = 1024  # of the histogram of w over [0, cap]; the 99th percentile is exact to cap / 1024


@dataclass(frozen=True)
class Metrics:
    """Metrics of an optimizer step, over the tokens that count. All zero where there are none.

    Attributes:
        loss: the step's loss.
        tokens: tokens that count (N of `token_mean`).
        masked_share: share of the packed response tokens that do not count.
        weight_mean, weight_max, weight_p99: of the correction weight w, after truncation.
        weight_at_cap: share of tokens whose prox/mu reaches the cap.
        importance_mean, importance_max: of prox/mu before truncation.
        effective_sample_size: (sum w)^2 / (n sum w^2), between 0 and 1.
        kl_k1, kl_k3: estimates of KL(mu || prox), nats; under `bypass` and with an interpolated prox of
            KL(mu || theta). k1 may be negative.
        clip_above, clip_below, clip_dual: share of tokens at which the clip acts.
        entropy: mean entropy of theta, nats.
        probability: mean of theta's probability of the sampled token.
        probability_gap: mean |p_learner - p_sampler| of the sampled token; above 0.01 something is broken.
        kl_reference: k3 estimate of KL(theta || reference), nats; 0 without a reference.
    """

    loss: float
    tokens: int
    masked_share: float
    weight_mean: float
    weight_max: float
    weight_p99: float
    weight_at_cap: float
    importance_mean: float
    importance_max: float
    effective_sample_size: float
    kl_k1: float
    kl_k3: float
    clip_above: float
    clip_below: float
    clip_dual: float
    entropy: float
    probability: float
    probability_gap: float
    kl_reference: float


@dataclass(frozen=True)
class MetricSums:
    """Metrics in the making. `added`: (totals + bins,) float64, add them; `peaks`: (2,) float64, take the maximum."""

    added: Tensor
    peaks: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> MetricSums:
        return cls(
            added=torch.zeros(len(_TOTALS) + _BINS, dtype=torch.float64, device=device),
            peaks=torch.zeros(2, dtype=torch.float64, device=device),
        )

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(self.added + other.added, torch.maximum(self.peaks, other.peaks))

    def finish(self, cap: float) -> Metrics:
        """The metrics of everything added up. `cap` is the one the sums were measured with."""
        added = self.added.tolist()
        total = dict(zip(_TOTALS, added, strict=False))
        tokens, present = total["tokens"], total["present"]
        mean = {name: value / max(tokens, 1.0) for name, value in total.items()}
        squares = tokens * total["weight_squared"]
        weight_max, importance_max = self.peaks.tolist()
        return Metrics(
            loss=total["loss"],
            tokens=int(tokens),
            masked_share=(present - tokens) / max(present, 1.0),
            weight_mean=mean["weight"],
            weight_max=weight_max,
            weight_p99=min(_percentile(added[len(_TOTALS) :], 0.99, cap), weight_max),
            weight_at_cap=mean["at_cap"],
            importance_mean=mean["importance"],
            importance_max=importance_max,
            effective_sample_size=total["weight"] ** 2 / squares if squares else 0.0,
            kl_k1=mean["k1"],
            kl_k3=mean["k3"],
            clip_above=mean["clip_above"],
            clip_below=mean["clip_below"],
            clip_dual=mean["clip_dual"],
            entropy=mean["entropy"],
            probability=mean["probability"],
            probability_gap=mean["probability_gap"],
            kl_reference=mean["kl_reference"],
        )


def _percentile(histogram: list[float], share: float, cap: float) -> float:
    """Upper edge of the first bin at which `share` of the histogram is reached; 0 for an empty one."""
    wanted, seen = share * sum(histogram), 0.0
    for index, count in enumerate(histogram):
        seen += count
        if count and seen >= wanted:
            return (index + 1) * cap / _BINS
    return 0.0


def measure(
    *,
    loss: Tensor,
    mask: Tensor,
    logp: Tensor,
    drift: Tensor,
    behav_logp: Tensor,
    importance: Tensor,
    weight: Tensor,
    capped: Tensor,
    cap: float,
    clip_above: Tensor,
    clip_below: Tensor,
    clip_dual: Tensor,
    entropy: Tensor,
    kl_reference: Tensor | None = None,
) -> MetricSums:
    """Sums of one micro-batch. All tensors are detached and of shape (tokens,), but for the scalar `loss`.

    `drift` is log(prox / mu) in nats, zero where masked. `kl_reference`: None counts as zero.
    """
    def total(values: Tensor) -> Tensor:
        return torch.where(mask, values.double(), 0.0).sum()

    drift, weight = drift.double(), weight.double()
    learner = drift + behav_logp.double()
    sums = {
        "loss": loss.double(),
        "present": mask.new_ones(len(mask), dtype=torch.float64).sum(),
        "tokens": total(torch.ones_like(weight)),
        "weight": total(weight),
        "weight_squared": total(weight.square()),
        "at_cap": total(capped),
        "importance": total(importance),
        "k1": total(-drift),
        "k3": total(drift.clamp(-20, 20).exp() - drift - 1),
        "clip_above": total(clip_above),
        "clip_below": total(clip_below),
        "clip_dual": total(clip_dual),
        "entropy": total(entropy),
        "probability": total(logp.double().clamp(max=0).exp()),
        "probability_gap": total((learner.clamp(max=0).exp() - behav_logp.double().clamp(max=0).exp()).abs()),
        "kl_reference": drift.new_zeros(()) if kl_reference is None else total(kl_reference),
    }
    counted = mask.double()
    bins = (weight * (_BINS / cap)).ceil().long().sub(1).clamp(0, _BINS - 1)
    histogram = counted.new_zeros(_BINS).index_add(0, bins, counted)
    peaks = [torch.cat([counted.new_zeros(1), torch.where(mask, x.double(), 0.0)]).amax() for x in (weight, importance)]
    return MetricSums(
        added=torch.cat([torch.stack([sums[name] for name in _TOTALS]), histogram]), peaks=torch.stack(peaks)
    )
