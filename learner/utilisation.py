"""How well the ranks' time is used: model FLOPs utilisation, and what is lost where ranks wait for each other.

MFU is that of Chowdhery et al. 2022 ("PaLM"), appendix B: what forward and backward of the model need by themselves,
however much is computed twice, over what the devices could do meanwhile. Of attention only the pairs of tokens that see
each other count, of the head only scored positions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.config import LearnerConfig
from learner.packing import Packed

# Dense bfloat16, TFLOP/s, from NVIDIA's data sheets; the first whose words are all in a device's name.
_PEAKS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200", 989.0), ("GH200", 989.0), ("H800", 989.0),
    ("H20", 148.0), ("B200", 2250.0), ("A100", 312.0), ("A800", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
)  # fmt: skip

Plan = Sequence[Sequence[Packed]]  # of an optimizer step: for every rank its rows, as `learner.packing.plan` has them


@dataclass(frozen=True)
class Work:
    """What a model computes.

    Attributes:
        body: weights that every token is multiplied by.
        head: weights that every scored position is multiplied by.
        attention: width of attention, heads times head dimension, summed over layers.
        trained: whether the weights get gradients; below adapters only activations do.
    """

    body: int
    head: int
    attention: int
    trained: bool

    @classmethod
    def of(cls, model: Any, trained: bool) -> Work | None:
        """Of a Hugging Face causal language model that is whole on this rank; None: not known of mixtures of experts,
        where a token meets some of the weights only, and of models whose configuration does not say what their
        attention is like."""
        text = model.config.get_text_config()
        heads, layers = (getattr(text, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
        if not heads or not layers or getattr(text, "num_experts_per_tok", None):
            return None
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        body = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p is not head and p is not embedding)
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(body, head.numel(), layers * heads * width, trained)

    def flops(self, tokens: int, scored: int, pairs: int) -> float:
        """Of forward and backward, for so many tokens, positions with logits, and pairs of tokens in attention."""
        weights = (6.0 if self.trained else 4.0) * (self.body * tokens + self.head * scored)
        return weights + 12.0 * self.attention * pairs

    def flops_of(self, row: Packed) -> float:
        # A token sees what is before it in its sequence, prompt included, and itself: as many as its position says.
        return self.flops(len(row.input_ids), len(row.targets), int(row.position_ids.sum()) + len(row.position_ids))


def peak_tflops(learner: LearnerConfig) -> float | None:
    """What this rank's device can do at most; None: not known."""
    if learner.peak_tflops is not None or not torch.cuda.is_available() or learner.dtype != "bfloat16":
        return learner.peak_tflops
    return peak_of(torch.cuda.get_device_name())


def peak_of(device: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a device of this name; None: not known, as of a part of one."""
    words = set(re.split(r"[\s-]+", device))
    return None if "MIG" in words else next((peak for name, peak in _PEAKS if words.issuperset(name.split())), None)


def padding_share(plans: Sequence[Plan]) -> float:
    """Share of the ranks' work, in tokens, that is waiting: rows hold no padding, but the rows of a lock-step take as
    long as the longest of them."""
    used = paid = 0
    for plan in plans:
        for rows in zip(*plan, strict=True):
            tokens = [len(row.input_ids) if len(row.targets) else 0 for row in rows]
            used, paid = used + sum(tokens), paid + len(rows) * max(tokens)
    return 1 - used / max(paid, 1)


def mfu(work: Work, plans: Sequence[Plan], device_s: float, peak: float) -> float:
    """Share of `peak`, in TFLOP/s, that the model made of these rows' time: `device_s` seconds, summed over ranks."""
    return sum(work.flops_of(row) for plan in plans for rows in plan for row in rows) / (1e12 * peak * device_s)
