"""Attention over packed rows, a group at a time: the prompt once, each response seeing it and itself.

A row's mask is block-diagonal over its groups, so attention over the whole row would spend most of its work on pairs
that may not see each other; here it is computed for each group by itself, with the mask of the group (PyTorch's
scaled-dot-product attention, on any device). Variable-length flash attention knows no such mask: it would compute every
prompt once a response. Promises: the numbers of the whole row's mask; a model that does not hand `blocks` on to its
attention gets the whole row's mask, and is only slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "headrace_blocks"
Block = tuple[int, int, Tensor]  # first token of the row, end, and who may see whom in between: (tokens, tokens) bool


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
        blocks = ((0, query.shape[2], attention_mask),)
    options |= {"scaling": scaling, "dropout": dropout}
    parts = [
        sdpa_attention_forward(
            module, query[:, :, first:end], key[:, :, first:end], value[:, :, first:end], mask, **options
        )[0]
        for first, end, mask in blocks
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None
