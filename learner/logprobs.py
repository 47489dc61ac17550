"""Log-probabilities of response tokens by a Hugging Face causal language model, over packed rows.

Promises: the numbers (and gradients) equal those of one unpadded forward pass per sequence; softmax and entropy are
computed in float32 (float64 for a float64 model) from logits divided by the sampling temperature, a chunk of tokens at
a time; logits exist for response tokens only, and for a chunk of them only where the head is fused (`learner.head`).
Everything goes through the model's own forward, so a DeepSpeed engine of any ZeRO stage may stand in for the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from learner.attention import row_attention, row_blocks
from learner.head import FusedHead, Wanted
from learner.packing import Packed
from learner.sequence import ALONE, Part, Sharing


def check_packable(model_config: Any, longest: int) -> None:
    """Refuse models whose attention a packed row would change: sliding windows shorter than `longest` tokens, and
    layers that carry a state along the row.

    Raises:
        ConfigError: names the model type and the reason.
    """
    kind = getattr(model_config, "model_type", "?")
    window = getattr(model_config, "sliding_window", None)
    layers = set(getattr(model_config, "layer_types", None) or ())
    if getattr(model_config, "use_sliding_window", True) is False or layers == {"full_attention"}:
        window = None
    if window is not None and window < longest:
        raise ConfigError(
            f"model.path: {kind} attends within {window} tokens and sequences may have {longest}; packed training "
            "needs full attention: use shorter sequences or another model"
        )
    if unknown := layers - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"model.path: {kind} has layers {sorted(unknown)}; packed training needs attention only")


def packed_logprobs(
    model: nn.Module,
    packed: Packed,
    temperature: float,
    chunk: int | None = None,
    entropy_gradient: bool = False,
    sharing: Sharing = ALONE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of every target of a packed row, and the entropy at it.

    Args:
        model: causal LM (or an engine around it), called with HF's arguments; attn_implementation "sdpa" or that of
            `learner.attention`.
        packed: a row of `learner.packing.plan`.
        temperature: the sampler's.
        chunk: tokens whose float32 logits exist at the same time; None: what suits the head.
        entropy_gradient: whether entropy carries a gradient too.
        sharing: with whom this rank computes the row; all of them call this with the same one.

    Returns:
        logp (R,) and entropy (R,), nats, float32 (or float64); without `entropy_gradient` only logp carries a gradient.
    """
    device, part = next(model.parameters()).device, sharing.part(packed)
    predict_from, row = row_inputs(part, device)
    targets = torch.tensor(packed.targets[part.targets], dtype=torch.long, device=device)
    inner: Any = getattr(model, "module", model)
    fused = getattr(inner.get_output_embeddings(), "forward", None)
    if not isinstance(fused, FusedHead):
        output = model(**row, logits_to_keep=predict_from)
        both = torch.stack(token_logprobs(output.logits[0], targets, temperature, chunk or 1024, entropy_gradient), -1)
    else:
        fused.wanted = Wanted(targets, temperature, chunk, entropy_gradient)
        both = model(**row, logits_to_keep=predict_from).logits[0]
    logp, entropy = part.whole(both).unbind(-1)
    return logp, entropy if entropy_gradient else entropy.detach()


def row_inputs(part: Part, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Where in a rank's part of a packed row its targets are predicted from, (own targets,) int64, and what a Hugging
    Face model is called with to compute it; `blocks` and `sharing` are for `learner.attention`."""
    whole, shared = part.row, part.sharing.size > 1
    row = {name: torch.tensor(getattr(whole, name), dtype=torch.long, device=device)
           for name in ("input_ids", "position_ids", "group_of", "response_of")}  # fmt: skip
    inputs = {
        "input_ids": row["input_ids"][None, part.tokens],
        "position_ids": row["position_ids"][None, part.tokens],
        # Of a shared row no rank needs the mask; one that fits nothing shows an attention that would miss the blocks.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
        if shared
        else row_attention(row["group_of"], row["response_of"])[None, None],
        "blocks": row_blocks(whole.group_of, whole.response_of, device),
        "use_cache": False,
        **({"sharing": part.sharing} if shared else {}),
    }
    predict_from = torch.tensor(whole.predict_from[part.targets], dtype=torch.long, device=device) - part.tokens.start
    return predict_from, inputs


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, chunk: int = 1024, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution.

    Args:
        logits: (tokens, vocabulary), any floating type. Backward overwrites them with their gradient.
        targets: (tokens,) int64.

    Returns:
        logp (tokens,) and entropy (tokens,), nats, at least float32; entropy is detached without `entropy_gradient`.
    """
    logp, entropy = _TokenLogprobs.apply(logits, targets, temperature, chunk, entropy_gradient)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and a number or two a token; the softmax is made again, in chunks, in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logp, entropy, total = (torch.empty(len(targets), dtype=dtype, device=logits.device) for _ in range(3))
        for first in range(0, len(targets), chunk):
            part = slice(first, first + chunk)
            scaled = logits[part].to(dtype) / temperature
            total[part] = scaled.logsumexp(-1)
            logp[part] = scaled.gather(-1, targets[part, None])[:, 0] - total[part]
            entropy[part] = torch.special.entr((scaled - total[part, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits, targets, total, *([entropy] if entropy_gradient else []))
        ctx.temperature, ctx.chunk = temperature, chunk
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, total, *entropy = ctx.saved_tensors
        upstream = gradients[0] / ctx.temperature
        # d logp / d logits = (1[target] - p) / temperature, d entropy / d logits = -p (log p + entropy) / temperature;
        # written over the logits: nobody needs them again, and autograd refuses a second backward by itself.
        for first in range(0, len(targets), ctx.chunk):
            part = slice(first, first + ctx.chunk)
            softmax = (logits[part].to(total.dtype) / ctx.temperature - total[part, None]).exp_()
            extra = None
            if entropy:
                extra = torch.special.entr(softmax) - softmax * entropy[0][part, None]
                extra *= gradients[1][part, None] / ctx.temperature
            gradient = softmax.neg_()
            gradient.scatter_add_(-1, targets[part, None], torch.ones_like(total[part, None]))
            gradient = gradient * upstream[part, None]
            logits[part] = gradient if extra is None else gradient + extra
        return logits, None, None, None, None


def float32_head(model: nn.Module) -> None:
    """Make the language-model head of a bf16 or fp16 model return float32 logits, in place.

    Rounding a logit of 20 to bf16 moves it by up to 0.06; the products themselves are exact in float32 (and in TF32).
    Weights and their gradients keep their type, and whatever the model does to its logits afterwards still happens.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]

    def forward(hidden: Tensor) -> Tensor:
        return _Float32Linear.apply(hidden, head.weight, head.bias)

    head.forward = forward


class _Float32Linear(torch.autograd.Function):
    """hidden @ weight.T + bias in float32, without keeping a float32 copy of the weight for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        flat = hidden.flatten(0, -2)
        for_hidden = (gradient @ weight.float()).to(hidden.dtype).view_as(hidden)
        for_weight = (gradient.T @ flat.float()).to(weight.dtype)
        return for_hidden, for_weight, gradient.sum(0).to(weight.dtype) if ctx.has_bias else None
