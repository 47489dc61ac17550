"""Attention over packed rows, a group at a time: the prompt once, each response seeing it and itself.

A row's mask is block-diagonal over its groups, so attention over the whole row would spend most of its work on pairs
that may not see each other. Here it is computed for a group by itself, and for each response of a long group by itself,
with its prompt's keys before its own (PyTorch's scaled-dot-product attention with a mask, on any device).
Variable-length flash attention knows no such mask: it would compute every prompt once a response. Promises: the numbers
of the whole row's mask; a model that does not hand `blocks` on to its attention gets the whole row's mask, and is only
slower (or refused, where the row is shared: see `learner.sequence`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.sequence import Sharing

NAME = "headrace_blocks"
SMALL_BLOCK, LONG_GROUP = 256, 1024  # tokens: smaller groups share a block, longer ones are cut


class Block(NamedTuple):
    """Tokens `first` to `end` of the row, which see those of `prompt` and themselves as far as `mask` says:
    (1, 1, tokens, tokens of the prompt + tokens) bool."""

    first: int
    end: int
    prompt: slice
    mask: Tensor


def row_attention(group_of: Tensor, response_of: Tensor) -> Tensor:
    """(T, T) bool, True where the token of the row may see that of the column.

    A token sees those before it, and itself, in its group's prompt and in its own response.
    """
    order = torch.arange(len(group_of), device=group_of.device)
    before = order[None, :] <= order[:, None]
    same_group = group_of[None, :] == group_of[:, None]
    prompt_or_own = (response_of[None, :] == -1) | (response_of[None, :] == response_of[:, None])
    return before & same_group & prompt_or_own


def row_blocks(
    group_of: NDArray[np.int32], response_of: NDArray[np.int32], device: torch.device
) -> tuple[Block, ...]:
    """The blocks of a packed row, which cover it in order."""
    blocks: list[Block] = []
    groups, responses = (torch.tensor(array, device=device) for array in (group_of, response_of))

    def add(first: int, end: int, prompt: slice) -> None:
        # Who sees whom is a matter of order and of the two arrays, so a row without what lies between does as well.
        own = [torch.cat([array[prompt], array[first:end]]) for array in (groups, responses)]
        blocks.append(Block(first, end, prompt, row_attention(*own)[None, None, first - end :]))

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


def reached(model: Any) -> bool:
    """Whether `blocks` come through to the attention of every layer, tried on one token."""
    calls: list[None] = []

    class Watched(tuple[Block, ...]):
        def __iter__(self) -> Iterator[Block]:
            calls.append(None)
            return super().__iter__()

    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    blocks = Watched([Block(0, 1, slice(0, 0), torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device))])
    with torch.no_grad():
        model(input_ids=token, blocks=blocks, use_cache=False)
    return len(calls) == model.config.get_text_config().num_hidden_layers


@torch.compiler.disable
def block_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    blocks: tuple[Block, ...] | None = None,
    sharing: Sharing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface: (1, heads, tokens, width) each, and (1, tokens, heads, width)
    back. `blocks` cover the row, in order; None: `attention_mask` counts. `sharing`: with whom the row is shared; the
    tokens are then those of this rank."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if sharing is not None:
        query, key, value = sharing.tokens_for_heads(query, key, value)
        # All that is asked of the layer: it does not know how many heads there are now.
        part: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        options |= {"blocks": blocks, "scaling": scaling, "dropout": dropout}
        return sharing.heads_for_tokens(block_attention(part, query, key, value, None, **options)[0]), None
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
