"""The DAPO objective and its off-policy correction, as pure functions over flat tensors.

Every tensor has one entry per response token of a micro-batch, shape (tokens,); `sequence_index` says which response a
token belongs to, and no response is cut across micro-batches. `scale` already holds the normaliser (1/N and its
relatives, `learner.batch.sequence_scale`), so the loss of an optimizer step is the plain **sum** of the losses of its
micro-batches over all ranks, and no cut of the step can change the gradient.

Three policies: mu sampled the token (`behav_logp`), prox anchors the clip (`prox_logp`), theta is trained (`logp`); a
fourth, the frozen reference, only where `kl_coefficient` asks for it.
Equation numbers are those of the DAPO paper (arXiv 2503.14476). Promises: finite loss and bounded gradient for any
finite log-probabilities; masked tokens contribute exactly zero, whatever they hold; no token at all gives a loss of
zero that is still connected to the graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import CorrectionConfig, ObjectiveConfig
from common.errors import HeadraceError
from learner.objective_metrics import MetricSums, measure

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8 is still finite, and the clamp stops the gradient beyond it


@dataclass(frozen=True)
class Tokens:
    """The response tokens of one micro-batch; every field has shape (tokens,).

    Attributes:
        logp: log pi_theta, nats, carries the gradient.
        prox_logp: log pi_prox, nats; not read in mode `bypass`.
        behav_logp: log mu, nats, of the processed distribution (after temperature).
        advantage: no unit, same for all tokens of a response.
        mask: bool, True where the token counts (after overlong filter, age and rejection).
        sequence_index: int64, response of the token within the optimizer step.
        scale: weight of the token's loss, 1/N in mode `token_mean`; no unit.
        entropy: nats, of theta's distribution at the token; carries a gradient where `entropy_bonus` asks for it.
    """

    logp: Tensor
    prox_logp: Tensor
    behav_logp: Tensor
    advantage: Tensor
    mask: Tensor
    sequence_index: Tensor
    scale: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Loss:
    """What one micro-batch contributes to the optimizer step.

    Attributes:
        loss: scalar with gradient; sum it over micro-batches and ranks.
        per_token: (tokens,) loss before `scale`, correction and options included, zero where masked; detached.
        ratio: (tokens,) r of Eq. 8 (of the sequence in `gspo`); detached.
        weight: (tokens,) correction weight w; detached.
        sums: metrics of the micro-batch, to be added up and finished.
    """

    loss: Tensor
    per_token: Tensor
    ratio: Tensor
    weight: Tensor
    sums: MetricSums


def sequence_sum(values: Tensor, sequence_index: Tensor) -> Tensor:
    """Sum of `values` over each token's sequence, given back to every token: (tokens,) -> (tokens,)."""
    sequences = int(sequence_index.max()) + 1 if len(sequence_index) else 0
    return values.new_zeros(sequences).index_add(0, sequence_index, values)[sequence_index]


def sequence_mean(values: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Mean of `values` (zero where masked) over the counted tokens of each token's sequence; 0 where there are none."""
    counted = sequence_sum(mask.to(values.dtype), sequence_index)
    return sequence_sum(values, sequence_index) / counted.clamp(min=1)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) in nats, zero where masked; not clamped."""
    return torch.where(mask, numerator - denominator, 0.0)


def bounded_exp(log_value: Tensor) -> Tensor:
    return log_value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_ratio(tokens: Tokens, anchor: Tensor, kind: str) -> Tensor:
    """r_it = pi_theta / pi_anchor (Eq. 8). `gspo`: the geometric mean of r over the sequence, at each of its tokens."""
    difference = log_ratio(tokens.logp, anchor, tokens.mask)
    if kind == "gspo":
        difference = sequence_mean(difference, tokens.mask, tokens.sequence_index)
    return bounded_exp(difference)


def clipped_surrogate(tokens: Tokens, ratio: Tensor, config: ObjectiveConfig) -> Tensor:
    """Loss of every token, to be minimised: Eq. 8 with Clip-Higher (Eq. 10), and the dual clip, which the paper lacks.

    `cispo` keeps a gradient on every token: the clipped ratio is a constant weight on log pi_theta.
    """
    advantage = tokens.advantage
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.ratio == "cispo":
        return -clipped.detach() * advantage * torch.where(tokens.mask, tokens.logp, 0.0)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if config.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * config.dual_clip), loss)
    return loss


def clip_masks(ratio: Tensor, advantage: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Where the clip acts: above 1 + clip_high, below 1 - clip_low, beyond the dual clip; each (tokens,) bool.

    Such a token has no gradient; under `cispo`, whose clip ignores the sign of A, its weight is the bound.
    """
    above, below = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    if config.ratio == "cispo":
        return above, below, torch.zeros_like(above)
    dual = (advantage < 0) & (ratio > (config.dual_clip or math.inf))
    return above & (advantage > 0), below & (advantage < 0), dual


def correction_ratio(tokens: Tokens, correction: CorrectionConfig) -> Tensor:
    """pi_prox / mu per token or per sequence, before truncation, detached; 1 in the modes that do not weight.

    `bypass` clips against mu itself: a weight on top would count the same drift twice.
    """
    if correction.mode != "decoupled":
        return torch.ones_like(tokens.behav_logp)
    difference = log_ratio(tokens.prox_logp, tokens.behav_logp, tokens.mask)
    if correction.level == "sequence":
        difference = sequence_sum(difference, tokens.sequence_index)
    return bounded_exp(difference).detach()


def interpolated_proximal(logp: Tensor, behav_logp: Tensor, staleness: Tensor) -> Tensor:
    """log pi_prox between mu and theta by the token's age, without a forward pass (A-3PO, arXiv 2512.06547).

    log prox = alpha log mu + (1 - alpha) log theta, with alpha = 1 / max(d, 1) at staleness d. So r is
    (theta / mu)^alpha and prox / mu is (theta / mu)^(1 - alpha). At d = 0 mu *is* the policy at the start of the batch,
    so prox is exact there, and the later updates of a batch are clipped against it. (The authors' description has
    alpha = 0 at d = 0, which would never clip such a token; their code in AReaL takes mu, as here.)

    Args:
        logp: (tokens,) log pi_theta, nats; its gradient is not followed.
        behav_logp: (tokens,) log mu, nats.
        staleness: (tokens,) int, versions between mu and the learner at the start of the batch, >= 0.

    Returns:
        (tokens,) nats, detached.
    """
    alpha = staleness.clamp(min=1).to(logp.dtype).reciprocal()
    return torch.lerp(logp.detach(), behav_logp.to(logp.dtype), alpha)


def reference_kl(logp: Tensor, reference_logp: Tensor, mask: Tensor) -> Tensor:
    """k3 estimate of KL(theta || reference) at every token: exp(d) - d - 1, d = log ref - log theta clamped to +-20.

    The estimator is Schulman's ("Approximating KL divergence", 2020), its use in the loss GRPO's (arXiv 2402.03300,
    Eq. 4). Returns (tokens,) nats, >= 0, zero where masked, without a gradient beyond the clamp.
    """
    difference = log_ratio(reference_logp, logp, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def policy_loss(tokens: Tokens, config: ObjectiveConfig, reference_logp: Tensor | None = None) -> Loss:
    """sum(mask * (l * w + kl_coefficient * KL - entropy_bonus * H) * scale) over one micro-batch, and its metrics.

    The correction weight w multiplies the surrogate l only, as is usual. It corrects whose samples an advantage was
    earned on; KL and entropy are regularisers, and w would weaken their pull just where theta has given a token up.

    Args:
        tokens: the micro-batch.
        config: the objective.
        reference_logp: (tokens,) log-probabilities under the reference, nats; needed iff `kl_coefficient` > 0.
    """
    correction = config.correction
    anchor = tokens.behav_logp if correction.mode == "bypass" else tokens.prox_logp
    ratio = policy_ratio(tokens, anchor.detach(), config.ratio)
    importance = correction_ratio(tokens, correction)
    weight = importance.clamp(max=correction.cap) if correction.mode == "decoupled" else importance
    # The weight comes after clipping; masked entries are replaced, not multiplied, so that nothing of them survives.
    per_token = torch.where(tokens.mask, clipped_surrogate(tokens, ratio, config) * weight, 0.0)
    kl = None
    if config.kl_coefficient > 0:
        if reference_logp is None:
            raise HeadraceError("objective.kl_coefficient is above 0; expected the reference's log-probabilities")
        kl = reference_kl(tokens.logp, reference_logp, tokens.mask)
        per_token = per_token + config.kl_coefficient * kl
    if config.entropy_bonus > 0:
        per_token = per_token - config.entropy_bonus * torch.where(tokens.mask, tokens.entropy, 0.0)
    loss = (per_token * tokens.scale).sum()
    # Under bypass prox is mu, interpolated it is drawn towards mu: the drift worth watching is then theta's.
    of_theta = correction.mode == "bypass" or correction.proximal == "interpolated"
    learner_logp = tokens.logp if of_theta else tokens.prox_logp
    above, below, dual = clip_masks(ratio, tokens.advantage, config)
    sums = measure(
        loss=loss.detach(),
        mask=tokens.mask,
        logp=tokens.logp.detach(),
        drift=log_ratio(learner_logp, tokens.behav_logp, tokens.mask).detach(),
        behav_logp=tokens.behav_logp,
        importance=importance,
        weight=weight,
        capped=importance >= (correction.cap if correction.mode == "decoupled" else math.inf),
        cap=correction.cap,
        clip_above=above,
        clip_below=below,
        clip_dual=dual,
        entropy=tokens.entropy.detach(),
        kl_reference=None if kl is None else kl.detach(),
    )
    return Loss(loss=loss, per_token=per_token.detach(), ratio=ratio.detach(), weight=weight, sums=sums)


def rejection_mask(
    prox_logp: Tensor, behav_logp: Tensor, mask: Tensor, sequence_index: Tensor, correction: CorrectionConfig
) -> Tensor:
    """`mask` without the tokens (IcePop) and sequences (MIS) whose prox/mu leaves its inclusive band: (tokens,) bool.

    Apply it to every micro-batch before N is counted (`learner.batch.sequence_scale`): what it masks leaves N. A
    sequence is judged by its geometric mean over the tokens of `mask`, those `token_mask` takes away included.
    """
    difference = log_ratio(prox_logp, behav_logp, mask).detach()
    kept = mask
    if correction.token_mask is not None:
        kept = kept & _within(difference, correction.token_mask)
    if correction.sequence_mask is not None:
        kept = kept & _within(sequence_mean(difference, mask, sequence_index), correction.sequence_mask)
    return kept


def _within(log_value: Tensor, band: tuple[float, float]) -> Tensor:
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in band)
    return (log_value >= low) & (log_value <= high)
