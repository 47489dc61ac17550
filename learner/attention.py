"""Attention over packed rows, a group at a time: the prompt once, each response seeing it and itself.

A row's mask is block-diagonal over its groups, so attention over the whole row would spend most of its work on pairs
that may not see each other. Here it is computed for a group by itself, and for each response of a long group by itself,
with its prompt's keys before its own (PyTorch's scaled-dot-product attention with a mask, on any device).
Variable-length flash attention knows no such mask: it would compute every prompt once a response. Promises: the numbers
of the whole row's mask; a model that does not hand `blocks` on to its attention gets the whole row's mask, and is only
slower.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAME = "headrace_blocks"
SMALL_BLOCK, LONG_GROUP = 256, 1024  # tokens: smaller groups share a block, longer ones are cut


class Block(NamedTuple):
    """Tokens `first` to `end` of the row, which see those of `prompt` and themselves as far as `mask` says:
    (1, 1, tokens, tokens of the prompt + tokens) bool."""

    first: int
    end: int
    prompt: slice
    mask: Tensor


def row_blocks(group_of: NDArray[np.int32], response_of: NDArray[np.int32], seen: Tensor) -> tuple[Block, ...]:
    """The blocks of a packed row, which cover it in order; `seen` is the whole row's mask, (1, 1, tokens, tokens)."""
    blocks: list[Block] = []

    def add(first: int, end: int, prompt: slice) -> None:
        rows = seen[..., first:end, :]
        blocks.append(Block(first, end, prompt, torch.cat([rows[..., prompt], rows[..., first:end]], dim=-1)))

    ends = np.append(np.flatnonzero(np.diff(group_of)) + 1, len(group_of)).tolist()
    waiting = begin = 0  # first token of the groups that are to share a block; of this group
    for end in ends:
        if end - begin > LONG_GROUP:
            if begin > waiting:
                add(waiting, begin, slice(0, 0))
            cuts = [begin, *(np.flatnonzero(np.diff(response_of[begin:end])) + begin + 1).tolist(), end]
            for first, last in pairwise(cuts):
                add(first, last, slice(begin, cuts[1]) if first > begin else slice(0, 0))
            waiting = end
        elif end - waiting >= SMALL_BLOCK or end == len(group_of):
            add(waiting, end, slice(0, 0))
            waiting = end
        begin = end
    return tuple(blocks)


def register() -> str:
    """Make the attention known to transformers; its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, block_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a packed row
    return NAME


def block_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    blocks: tuple[Block, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface: (1, heads, tokens, width) each, and (1, tokens, heads, width)
    back. `blocks` cover the row, in order; None: `attention_mask` counts."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if blocks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    options |= {"scaling": scaling, "dropout": dropout}
    parts = []
    for first, end, prompt, mask in blocks:
        keys, values = key[:, :, first:end], value[:, :, first:end]
        if prompt.stop:
            keys, values = (torch.cat(pair, 2) for pair in ((key[:, :, prompt], keys), (value[:, :, prompt], values)))
        parts.append(sdpa_attention_forward(module, query[:, :, first:end], keys, values, mask, **options)[0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None
