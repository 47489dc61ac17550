"""Log-probabilities straight from hidden states: the language-model head and the softmax over it, a chunk at a time.

Promises: logits exist for one chunk of tokens only, in forward and in backward, and never for a whole row; numbers and
gradients are those of the plain computation in float32 (float64 for a float64 model). Backward multiplies hidden states
with the head again (four products instead of three) and saves every pass over the logits that autograd would make: the
softmax is formed in place, and a token's factor is applied to the hidden states' side of each product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_LOGITS = 2**25  # 128 MiB in float32


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden: (tokens, width), any floating type.
        weight: (vocabulary, width).
        bias: (vocabulary,).
        targets: (tokens,) int64.
        temperature: the sampler's.
        chunk: tokens whose logits exist at the same time; None: as many as have `CHUNK_LOGITS` logits.
        entropy_gradient: whether the entropy carries a gradient too.

    Returns:
        logp (tokens,) and entropy (tokens,), nats, at least float32; entropy is detached without `entropy_gradient`.
    """
    chunk = chunk or max(1, CHUNK_LOGITS // len(weight))
    logp, entropy = _HeadLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, entropy_gradient)
    return logp, entropy


class _HeadLogprobs(torch.autograd.Function):
    """Keeps hidden states and a number or two a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy, total = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        for part, logits in _chunks(hidden.to(dtype), weight.to(dtype), bias, temperature, chunk):
            logp[part] = logits.gather(-1, targets[part, None])[:, 0]
            peak = logits.amax(-1)
            logits -= peak[:, None]
            weights = logits.exp()
            mass = weights.sum(-1)
            total[part] = peak + mass.log()
            entropy[part] = mass.log() - torch.linalg.vecdot(weights, logits) / mass
        logp -= total
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropy if entropy_gradient else None)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, total, entropy = ctx.saved_tensors
        states, head = hidden.to(total.dtype), weight.to(total.dtype)
        # d logp / d logits = (1[target] - p) / temperature, d entropy / d logits = -p (log p + entropy) / temperature.
        # Without the second a token's factor is the same for all its logits, and is applied outside the products.
        factor = gradients[0] / -ctx.temperature
        for_hidden = torch.empty_like(states)
        for_weight = torch.zeros_like(head) if ctx.needs_input_grad[1] else None  # a frozen head needs none
        for_bias = None if bias is None else torch.zeros_like(bias, dtype=total.dtype)
        for part, logits in _chunks(states, head, bias, ctx.temperature, ctx.chunk):
            logits -= total[part, None]
            outside = factor[part, None]
            if entropy is None:
                logits.exp_()
                logits.scatter_add_(-1, targets[part, None], torch.full_like(outside, -1.0))
            else:
                softmax = logits.exp()
                logits += entropy[part, None]
                logits *= gradients[1][part, None] / -ctx.temperature
                logits += outside
                logits *= softmax
                logits.scatter_add_(-1, targets[part, None], -outside)
                outside = torch.ones_like(outside)
            torch.mm(logits, head, out=for_hidden[part]).mul_(outside)
            if for_weight is not None:
                for_weight.addmm_(logits.T, states[part] * outside)
            if for_bias is not None:
                for_bias += (logits.T @ outside)[:, 0]
        return (
            for_hidden.to(hidden.dtype),
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            *[None] * 4,
        )


def _chunks(
    states: Tensor, head: Tensor, bias: Tensor | None, temperature: float, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Logits over the temperature, a chunk of tokens at a time, all in the same memory: (tokens, vocabulary)."""
    memory = states.new_empty(min(chunk, len(states)), len(head))
    for first in range(0, len(states), chunk):
        part = slice(first, min(first + chunk, len(states)))
        logits = memory[: part.stop - first]
        torch.mm(states[part] / temperature, head.T, out=logits)
        if bias is not None:
            logits += bias.to(logits.dtype) / temperature
        yield part, logits


@dataclass(frozen=True)
class Wanted:
    """What the next call of a fused head is to return; see `head_logprobs`."""

    targets: Tensor
    temperature: float
    chunk: int | None
    entropy_gradient: bool


class FusedHead:
    """The forward of a head: logits as ever, or, once after `wanted` is set, log-probabilities and entropies.

    The second comes back in the place of the logits, (1, tokens, 2), through the model's own forward, so that whatever
    stands around the model (ZeRO's hooks, for example) still does its part."""

    def __init__(self, head: nn.Linear) -> None:
        self._head, self._logits = head, head.forward
        self.wanted: Wanted | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.wanted is None:
            return self._logits(hidden)
        wanted, self.wanted = self.wanted, None
        both = head_logprobs(
            hidden.flatten(0, -2),
            self._head.weight,
            self._head.bias,
            wanted.targets,
            wanted.temperature,
            wanted.chunk,
            wanted.entropy_gradient,
        )
        return torch.stack(both, dim=-1)[None]


def fuse_head(model: Any) -> bool:
    """Give the model's head a `FusedHead`, in place, where what it returns are the model's logits as they are.

    Tried on one token, with logits of up to 1,000 in the place of the head's: some models cap or scale them afterwards.
    False: nothing was changed.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    large = torch.linspace(-1000, 1000, len(head.weight), dtype=head.weight.dtype, device=head.weight.device)[
        None, None
    ]
    hook = head.register_forward_hook(lambda *_: large.clone())
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=head.weight.device)
        logits = model(input_ids=token, use_cache=False).logits
    hook.remove()
    if not torch.equal(logits, large):
        return False
    head.forward = FusedHead(head)  # type: ignore[method-assign, assignment]
    return True
