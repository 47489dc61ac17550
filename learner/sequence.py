"""Sequence parallelism: a packed row shared by the ranks of a group, each of which has a part of its tokens (DeepSpeed-
Ulysses, arXiv 2309.14509).

A group is N consecutive ranks that are given the same row. Each computes its N-th of the tokens through everything that
looks at one token at a time; for attention the ranks exchange tokens for heads, so that each has the whole row for an
N-th of the heads, and change back. The row's mask stays what it was, so prompts are still computed once. What a rank
found for its tokens comes back to all of the group (`Sharing.whole`), so that loss and metrics are computed as ever, on
whole responses, by each of them.

Promises: the numbers of one rank with the whole row; and of the loss that all ranks of a group compute, each follows
the gradient to its own tokens only, so that a parameter's gradients, summed over **all** ranks, are the row's.
Collectives are the same in number and order on all ranks of a group, whatever their parts hold.

(DeepSpeed's own classes for this take no mask of a packed row: their transformers integration knows causal sequences
only, and asks for its own data loader.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from learner.packing import Packed


@dataclass(frozen=True)
class Sharing:
    """How rows are shared, as this rank sees it.

    Attributes:
        size: ranks that share a row, N.
        index: of this one among them.
        group: to talk to the others; None where there are none.
    """

    size: int = 1
    index: int = 0
    group: Any = None

    @classmethod
    def join(cls, size: int) -> Sharing:
        """Groups of `size` consecutive ranks, which must divide the world. Every rank calls it."""
        if size == 1:
            return cls()
        group, _ = dist.new_subgroups(size)
        return cls(size, dist.get_rank(group), group)

    @property
    def leads(self) -> bool:
        """Whether this rank is the one of its group whose figures count: all of the group have the same."""
        return self.index == 0

    def part(self, packed: Packed) -> Part:
        """What this rank has of a row that every rank of the group was given."""
        return Part(self, _filled(packed, self.size))

    def tokens_for_heads(self, *tensors: Tensor) -> list[Tensor]:
        """From (1, heads, own tokens, width) each to (1, own heads, tokens, width), in one exchange.

        Fewer heads than ranks (keys and values) go to several ranks each.
        """
        parts = [_spread(tensor[0], self.size) for tensor in tensors]  # (ranks, heads of one, own tokens, width)
        exchanged = _Exchange.apply(torch.cat([part.flatten(1) for part in parts], dim=1), self.group)
        pieces = exchanged.split([part[0].numel() for part in parts], dim=1)
        return [
            piece.view(part.shape).transpose(0, 1).flatten(1, 2)[None]
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def heads_for_tokens(self, tensor: Tensor) -> Tensor:
        """The way back: from (1, tokens, own heads, width) to (1, own tokens, heads, width)."""
        parts = tensor[0].unflatten(0, (self.size, -1))  # (ranks, tokens of one, own heads, width)
        exchanged: Tensor = _Exchange.apply(parts.flatten(1), self.group)
        return exchanged.view(parts.shape).transpose(0, 1).flatten(1, 2)[None]


ALONE = Sharing()


@dataclass(frozen=True)
class Part:
    """The tokens that a rank has of a row, and the targets that are predicted from them.

    Attributes:
        sharing: with whom.
        row: the whole row, filled up with tokens that nobody sees to a multiple of the ranks.
    """

    sharing: Sharing
    row: Packed

    @cached_property
    def tokens(self) -> slice:
        """Of the row."""
        each = len(self.row.input_ids) // self.sharing.size
        return slice(self.sharing.index * each, (self.sharing.index + 1) * each)

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Index of the targets that are predicted from them, (own targets,)."""
        at, held = self.row.predict_from, self.tokens
        return np.flatnonzero((held.start <= at) & (at < held.stop))

    def whole(self, values: Tensor) -> Tensor:
        """From (own targets, ...) to (R, ...), on every rank of the group. See the module about its gradient."""
        if self.sharing.size == 1:
            return values
        own = torch.tensor(self.targets, device=values.device)
        whole: Tensor = _Whole.apply(values, own, len(self.row.targets), self.sharing.group)
        return whole


def _filled(packed: Packed, multiple: int) -> Packed:
    """The row with as many tokens of a group of their own, without targets, as make it a multiple."""
    short = -len(packed.input_ids) % multiple
    if not short:
        return packed

    def longer(array: NDArray[np.int32], value: int) -> NDArray[np.int32]:
        return np.concatenate([array, np.full(short, value, array.dtype)])

    return replace(
        packed,
        input_ids=longer(packed.input_ids, 0),
        position_ids=longer(packed.position_ids, 0),
        group_of=longer(packed.group_of, int(packed.group_of[-1]) + 1),
        response_of=longer(packed.response_of, -1),
    )


def _spread(heads: Tensor, ranks: int) -> Tensor:
    """(heads, ...) -> (ranks, heads of one, ...)."""
    if len(heads) < ranks:
        heads = heads.repeat_interleave(ranks // len(heads), dim=0)
    return heads.unflatten(0, (ranks, -1))


def check_heads(size: int, heads: int, key_heads: int) -> None:
    """Raises ConfigError where a model's heads cannot be shared out among `size` ranks."""
    if heads % size or (key_heads % size and size % key_heads):
        right = [n for n in range(1, heads + 1) if heads % n == 0 and (key_heads % n == 0 or n % key_heads == 0)]
        raise ConfigError(
            f"learner.sequence_parallel: {size} ranks cannot share the {heads} attention heads ({key_heads} of keys "
            f"and values) of the model out among them; use one of {', '.join(map(str, right))}"
        )


class _Exchange(torch.autograd.Function):
    """Row i of (ranks, numbers) goes to rank i, whose row for this rank takes its place; so do the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    taken = torch.empty_like(parts)
    dist.all_to_all_single(taken, parts, group=group)
    return taken


class _Whole(torch.autograd.Function):
    """What each rank of the group has, put together on all of them; the gradient goes to one's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        whole = values.new_zeros(total, *values.shape[1:])
        whole[own] = values
        dist.all_reduce(whole, group=group)  # each is on one rank, and zero on the others
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0][own], None, None, None
