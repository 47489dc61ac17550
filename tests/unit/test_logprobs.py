"""Packed log-probabilities against plain forward passes, and the gradient of a whole step under every cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_inputs import VOCABULARY, float64_model, make_config, make_group, tiny_model
from torch import nn
from transformers import AttentionInterface

from common.errors import ConfigError
from learner import attention
from learner.batch import Step, build_step
from learner.head import FusedHead, fuse_head, head_logprobs
from learner.logprobs import check_packable, float32_head, packed_logprobs, token_logprobs
from learner.objective import Tokens, policy_loss
from learner.packing import Packed, plan

TEMPERATURE = 0.7


def make_step(seed: int = 0, **config: Any) -> Step:
    rng = np.random.default_rng(seed)
    shapes = [(7, [3, 9, 1, 6]), (1, [4, 4]), (12, [8, 2, 5])]
    groups = [make_group(rng, str(i), prompt, lengths) for i, (prompt, lengths) in enumerate(shapes)]
    return build_step(groups, make_config(**config), 0)


def plain_logprobs(model: nn.Module, step: Step) -> dict[int, torch.Tensor]:
    """One unpadded forward pass per sequence: the log-probabilities by sequence index."""
    out = {}
    for group in step.groups:
        for sequence in group.sequences:
            ids = torch.tensor(np.concatenate([group.prompt_ids, sequence.token_ids]), dtype=torch.long)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            logp = torch.log_softmax(logits / TEMPERATURE, -1)
            out[sequence.index] = logp.gather(-1, ids[len(group.prompt_ids) :, None])[:, 0]
    return out


def run(model: nn.Module, rows: list[Packed], objective: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step whose rows are given in the order in which they are trained."""
    model.zero_grad()
    total = 0.0
    objective = objective or make_config().objective
    for row in rows:
        logp, entropy = packed_logprobs(model, row, TEMPERATURE, chunk=5)
        behav = torch.tensor(row.behav_logp).to(logp)
        tokens = Tokens(
            logp=logp,
            prox_logp=behav + 0.1 * torch.sin(behav),
            behav_logp=behav,
            advantage=torch.tensor(row.advantage).to(logp),
            mask=torch.tensor(row.mask),
            sequence_index=torch.tensor(row.sequence_index).long(),
            scale=torch.tensor(row.scale).to(logp),
            entropy=entropy,
        )
        loss = policy_loss(tokens, objective).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [tiny_model, float64_model])
@pytest.mark.parametrize(("small", "long", "blocks"), [(1, 1000, 3), (1, 20, 10), (1000, 1000, 1), (12, 26, 6)])
def test_block_attention_equals_the_mask_of_the_whole_row_in_value_and_gradient(
    make: Any, small: int, long: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SMALL_BLOCK", small)
    monkeypatch.setattr(attention, "LONG_GROUP", long)
    called = []

    def watched(*arguments: Any, blocks: Any = None, **options: Any) -> Any:
        called.append(len(blocks))
        return attention.block_attention(*arguments, blocks=blocks, **options)

    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    [row] = plan(make_step(), 1, 10_000)[0]
    results = []
    for name in ("sdpa", attention.register()):
        AttentionInterface.register(attention.NAME, watched)
        model = make()
        model.set_attn_implementation(name)
        logp, _ = packed_logprobs(model, row, TEMPERATURE)
        logp.sum().backward()
        results.append([logp, *(p.grad for p in model.parameters())])
    assert called == [blocks, blocks]  # in each of two layers
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.detach().abs().max()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("limit", "fused"), [(30, False), (30, True), (45, True), (500, False), (500, True)])
def test_packed_logprobs_and_gradients_equal_plain_forward(tied: bool, limit: int, fused: bool) -> None:
    model, step = tiny_model(tied), make_step()
    assert not fused or fuse_head(model)
    plain = plain_logprobs(model, step)
    direction = {index: torch.randn_like(logp) for index, logp in plain.items()}
    sum((logp * direction[index]).sum() for index, logp in plain.items()).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row in plan(step, 1, limit)[0]:
        logp, _ = packed_logprobs(model, row, TEMPERATURE, chunk=4)
        order = list(dict.fromkeys(row.sequence_index.tolist()))
        torch.testing.assert_close(logp, torch.cat([plain[i] for i in order]), rtol=0, atol=1e-5)
        (logp * torch.cat([direction[i] for i in order])).sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_token_logprobs_any_chunk_equal_log_softmax_in_value_gradient_and_entropy() -> None:
    logits = torch.randn(11, VOCABULARY, dtype=torch.float64) * 3
    targets = torch.randint(0, VOCABULARY, (11,))
    upstream = torch.randn(11, dtype=torch.float64)
    expected_in = logits.clone().requires_grad_()
    distribution = torch.log_softmax(expected_in / TEMPERATURE, -1)
    expected = distribution.gather(-1, targets[:, None])[:, 0]
    (expected * upstream).sum().backward()
    for chunk in (1, 4, 11, 100):
        leaf = logits.clone().requires_grad_()
        logp, entropy = token_logprobs(leaf * 1.0, targets, TEMPERATURE, chunk)
        (logp * upstream).sum().backward()
        torch.testing.assert_close(logp, expected)
        torch.testing.assert_close(leaf.grad, expected_in.grad)
        torch.testing.assert_close(entropy, -(distribution.exp() * distribution).sum(-1).detach())
        assert not entropy.requires_grad


def test_token_logprobs_second_backward_refused_not_wrong() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)
    logp, _ = token_logprobs(leaf * 1.0, torch.zeros(3, dtype=torch.long), 1.0)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        logp.sum().backward()


@settings(max_examples=25, deadline=None)
@given(
    limit=st.integers(20, 200),
    ranks=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    aggregation=st.sampled_from(
        ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_token_mean"]
    ),
    ratio=st.sampled_from(["token", "gspo", "cispo"]),
    level=st.sampled_from(["token", "sequence"]),
)
def test_gradient_of_a_step_same_for_any_cut_order_and_ranks(
    limit: int, ranks: int, order: Any, aggregation: str, ratio: str, level: str
) -> None:
    config = {"aggregation": aggregation, "ratio": ratio, "correction": {"level": level}}
    step = make_step(objective=config)
    objective = make_config(objective=config).objective
    model = float64_model()
    assert fuse_head(model)
    [whole] = plan(step, 1, 10_000)[0]
    loss, wanted = run(model, [whole], objective)
    rows = [Packed.from_bytes(row.to_bytes()) for share in plan(step, ranks, limit) for row in share]
    order.shuffle(rows)
    cut_loss, gradients = run(model, rows, objective)
    assert cut_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-4
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("fused", [False, True])
def test_row_without_targets_gives_every_parameter_a_zero_gradient(fused: bool) -> None:
    """The collectives of ZeRO wait for every parameter's gradient, also on an idle rank."""
    model = tiny_model()
    assert not fused or fuse_head(model)
    idle = next(share[0] for share in plan(make_step(), 16, 100) if len(share[0].targets) == 0)
    loss, gradients = run(model, [idle])
    assert loss == 0.0
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert not any(bool(g.any()) or bool(g.isnan().any()) for g in gradients.values())


def test_row_fully_masked_contributes_zero_without_nan() -> None:
    model = tiny_model()
    [row] = plan(make_step(), 1, 10_000)[0]
    masked = Packed(**{**vars(row), "mask": np.zeros_like(row.mask)})
    loss, gradients = run(model, [masked])
    assert loss == 0.0
    assert not any(bool(g.any()) or bool(g.isnan().any()) for g in gradients.values())


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_head_logprobs_any_chunk_equal_autograd(chunk: int, entropy_gradient: bool) -> None:
    def leaves() -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        shapes = [(11, 6), (VOCABULARY, 6), (VOCABULARY,)]
        return [torch.randn(*s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]

    targets = torch.randint(0, VOCABULARY, (11,))
    up = torch.randn(2, 11, dtype=torch.float64)
    plain, ours = leaves(), leaves()
    log_p = torch.log_softmax((plain[0] @ plain[1].T + plain[2]) / TEMPERATURE, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    logp, our_entropy = head_logprobs(*ours, targets, TEMPERATURE, chunk, entropy_gradient)
    torch.testing.assert_close(logp, log_p.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(our_entropy, entropy)
    assert our_entropy.requires_grad is entropy_gradient
    ((logp * up[0]).sum() + (our_entropy * up[1] * entropy_gradient).sum()).backward()
    ((log_p.gather(-1, targets[:, None])[:, 0] * up[0]).sum() + (entropy * up[1] * entropy_gradient).sum()).backward()
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_head_logprobs_certain_and_hopeless_tokens_finite() -> None:
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    logp, entropy = head_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([0, 0]), 1.0)
    logp.sum().backward()
    assert logp.tolist() == [0.0, -2000.0] and entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None and hidden.grad.tolist() == [[0.0], [2.0]]


def test_fuse_head_refused_where_the_model_caps_its_logits() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma2ForCausalLM(Gemma2Config(**shape, **heads, pad_token_id=0))
    assert not fuse_head(model)
    assert not isinstance(model.lm_head.forward, FusedHead)


def test_fused_head_of_bfloat16_model_equals_float32_head() -> None:
    step = make_step()
    [row] = plan(step, 1, 10_000)[0]
    results = []
    for fused in (False, True):
        model = tiny_model(True, torch.bfloat16)
        float32_head(model)
        assert not fused or fuse_head(model)
        logp, entropy = packed_logprobs(model, row, TEMPERATURE)
        logp.sum().backward()
        results.append((logp, entropy, model.lm_head.weight.grad))
    assert results[1][2].dtype == torch.bfloat16
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_float32_head_of_bfloat16_model_makes_float32_logits_and_bfloat16_gradients(tied: bool) -> None:
    model, step = tiny_model(tied, torch.bfloat16), make_step()
    [row] = plan(step, 1, 10_000)[0]
    rough, _ = packed_logprobs(model, row, TEMPERATURE)
    float32_head(model)
    logp, _ = packed_logprobs(model, row, TEMPERATURE)
    logp.sum().backward()
    hidden = model.model(input_ids=torch.tensor([[1, 2]]), use_cache=False).last_hidden_state
    logits = model(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits
    assert logp.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T)
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert 0 < (rough - logp).abs().max() < 0.5


def test_float32_head_of_float32_model_leaves_gradients_as_they_are() -> None:
    model = tiny_model()
    [row] = plan(make_step(), 1, 10_000)[0]
    loss, wanted = run(model, [row])
    float32_head(model)
    again, gradients = run(model, [row])
    assert again == pytest.approx(loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name])


def test_check_packable_window_shorter_than_sequences_refused() -> None:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config

    check_packable(LlamaConfig(), 10_000)
    check_packable(MistralConfig(sliding_window=4096), 4096)
    check_packable(MistralConfig(sliding_window=None), 10_000)
    check_packable(Qwen2Config(sliding_window=4096, use_sliding_window=False), 10_000)
    with pytest.raises(ConfigError, match="4096 tokens"):
        check_packable(MistralConfig(sliding_window=4096), 4097)
    with pytest.raises(ConfigError, match="linear_attention"):
        check_packable(LlamaConfig(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2), 10)
