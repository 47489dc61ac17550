"""KL to a reference, entropy bonus and the interpolated proximal policy, each against its formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_inputs import make_config, make_group, make_response, tiny_model
from test_objective import make_objective, make_tokens

from common.errors import HeadraceError
from learner.batch import build_step
from learner.logprobs import packed_logprobs, token_logprobs
from learner.objective import interpolated_proximal, policy_loss, reference_kl
from learner.packing import plan


def grads(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    [gradient] = torch.autograd.grad(loss, of, retain_graph=True)
    return gradient


@pytest.mark.parametrize("aggregation_scale", [0.1, 0.7])
def test_kl_adds_its_k3_term_unweighted_with_its_gradient(aggregation_scale: float) -> None:
    tokens = make_tokens()
    tokens = replace(tokens, scale=torch.full_like(tokens.scale, aggregation_scale))
    reference = tokens.logp.detach() + 0.4 * torch.sin(torch.arange(12, dtype=torch.float64))
    plain = policy_loss(tokens, make_objective())
    result = policy_loss(tokens, make_objective(kl_coefficient=0.3), reference)
    d = (reference - tokens.logp)[tokens.mask]
    wanted = 0.3 * aggregation_scale * (d.exp() - d - 1).sum()
    assert result.loss.item() == pytest.approx(plain.loss.item() + wanted.item(), rel=1e-12)
    torch.testing.assert_close(
        grads(result.loss, tokens.logp), grads(plain.loss, tokens.logp) + grads(wanted, tokens.logp)
    )
    metrics = result.sums.finish(2.0)
    assert metrics.kl_reference == pytest.approx((d.exp() - d - 1).mean().item())
    assert replace(metrics, loss=0, kl_reference=0) == replace(plain.sums.finish(2.0), loss=0)


def test_kl_extreme_and_masked_tokens_finite_without_gradient() -> None:
    logp = torch.tensor([-1.0, -1.0, torch.nan], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1e4, -1e4, torch.nan], dtype=torch.float64)
    kl = reference_kl(logp, reference, torch.tensor([True, True, False]))
    kl.sum().backward()
    np.testing.assert_allclose(kl.detach().numpy(), [np.exp(20) - 21, np.exp(-20) + 19, 0.0])
    assert logp.grad is not None and not logp.grad.any()


def test_kl_without_the_reference_scored_refused() -> None:
    with pytest.raises(HeadraceError, match="kl_coefficient"):
        policy_loss(make_tokens(), make_objective(kl_coefficient=0.1))


def test_entropy_bonus_subtracts_entropy_and_its_gradient() -> None:
    tokens = make_tokens()
    entropy = torch.where(tokens.mask, tokens.entropy, torch.nan).requires_grad_()
    plain = policy_loss(tokens, make_objective())
    result = policy_loss(replace(tokens, entropy=entropy), make_objective(entropy_bonus=0.2))
    wanted = 0.2 * (tokens.entropy * tokens.scale)[tokens.mask].sum()
    assert result.loss.item() == pytest.approx(plain.loss.item() - wanted.item(), rel=1e-12)
    torch.testing.assert_close(grads(result.loss, entropy), torch.where(tokens.mask, -0.2 * tokens.scale, 0.0))
    assert not result.sums.added.requires_grad


@pytest.mark.parametrize("chunk", [2, 100])
def test_entropy_gradient_equals_autograd(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 11, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    targets, temperature = torch.tensor([0, 3, 10, 3, 7]), 0.7
    up = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    log_p = torch.log_softmax(logits / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    wanted = grads((up[0] * log_p[range(5), targets] + up[1] * entropy).sum(), logits)
    logp, ours = token_logprobs(logits.clone(), targets, temperature, chunk, entropy_gradient=True)
    torch.testing.assert_close(ours, entropy)
    torch.testing.assert_close(grads((up[0] * logp + up[1] * ours).sum(), logits), wanted)


@pytest.mark.parametrize("on", [False, True])
def test_packed_entropy_carries_a_gradient_only_on_request(on: bool) -> None:
    step = build_step([make_group(np.random.default_rng(0), "a", 4, [3, 5])], make_config(), 0)
    [[row]] = plan(step, 1, 100)
    logp, entropy = packed_logprobs(tiny_model(), row, 1.0, entropy_gradient=on)
    assert logp.requires_grad
    assert entropy.requires_grad is on


def test_interpolated_proximal_by_staleness() -> None:
    theta = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    prox = interpolated_proximal(theta, mu, torch.tensor([0, 1, 2, 4]))
    np.testing.assert_allclose(prox.numpy(), [-2.0, -2.0, -1.5, -1.25], rtol=1e-15)
    assert not prox.requires_grad


def test_interpolated_proximal_lies_between_mu_and_theta() -> None:
    tokens = make_tokens(40, 4)
    prox = interpolated_proximal(tokens.logp, tokens.behav_logp, torch.arange(40) % 6)
    low, high = torch.minimum(tokens.logp, tokens.behav_logp), torch.maximum(tokens.logp, tokens.behav_logp)
    assert ((prox >= low - 1e-12) & (prox <= high + 1e-12)).all()


def test_interpolated_proximal_drift_is_watched_between_mu_and_theta() -> None:
    tokens = make_tokens()
    tokens = replace(tokens, prox_logp=interpolated_proximal(tokens.logp, tokens.behav_logp, torch.ones(12).long()))
    metrics = policy_loss(tokens, make_objective(correction={"proximal": "interpolated"})).sums.finish(2.0)
    drift = (tokens.behav_logp - tokens.logp)[tokens.mask].mean().item()
    assert metrics.kl_k1 == pytest.approx(drift)  # prox is mu at staleness 1
    assert metrics.probability_gap > 0 and metrics.importance_mean == 1.0


def test_packs_carry_staleness_and_the_reward_at_the_last_token() -> None:
    rng = np.random.default_rng(0)
    responses = (make_response(rng, 4, 1.5, [(5, 0), (6, 1)]), make_response(rng, 2, -1.0, [(7, 0)]))
    group = replace(make_group(rng, "a", 3, [1]), responses=responses)
    [[row]] = plan(build_step([group], make_config(), policy_version=7), 1, 100)
    by_sequence = {int(i): row.sequence_index == i for i in np.unique(row.sequence_index)}
    assert row.staleness[by_sequence[0]].tolist() == [2, 1, 1, 1]
    assert row.reward[by_sequence[0]].tolist() == [0, 0, 0, 1.5]
    assert row.staleness[by_sequence[1]].tolist() == [0, 0]
    assert row.reward[by_sequence[1]].tolist() == [0, -1.0]


def test_gae_leaves_advantages_to_the_critic_and_accepts_a_group_of_one(recwarn: pytest.WarningsRecorder) -> None:
    config: Any = make_config(
        objective={"advantage": {"type": "gae"}}, sampling={"group_size": 1, "dynamic_sampling": False}
    )
    step = build_step([make_group(np.random.default_rng(0), "a", 3, [4])], config, 0)
    assert step.groups[0].sequences[0].advantage == 0.0
    assert not [warning for warning in recwarn if "baseline" in str(warning.message)]
