"""LoRA adapters as learner and generators share them: names, the sum with the base, and which base it was.

What it promises: both ends compute the same sum, in float32, and can tell by `base_checksum` that they add to the same
base, in whatever type each of them holds it. Knows neither PEFT nor vLLM.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

# A layer's factors are named as its weight is, with these in place of "weight".
A, B = "lora_A.weight", "lora_B.weight"
_SLICE = 64  # elements of every weight that `base_checksum` looks at


@dataclass(frozen=True)
class Adapter:
    """What belongs to the factors of an adapter besides.

    Attributes:
        scale: alpha / rank.
        base: `base_checksum` of the weights it is added to.
    """

    scale: float
    base: int


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A, float32 (arXiv 2106.09685, Eq. 3): (out, in) + (out, rank) (rank, in)."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def pairs(factors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by the name of the weight they belong to.

    Raises:
        WireError: a name is no factor's, a factor comes alone, or A and B are of different rank.
    """
    out: dict[str, tuple[Tensor, Tensor]] = {}
    for name in factors:
        layer, _, kind = name.rpartition("lora_")
        a, b = factors.get(f"{layer}{A}"), factors.get(f"{layer}{B}")
        if f"lora_{kind}" not in (A, B) or a is None or b is None:
            raise WireError(f"adapter: {name!r:.120} is not one of a pair of {A} and {B}")
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            raise WireError(
                f"adapter: {layer}: A is {tuple(a.shape)} and B {tuple(b.shape)}; expected (rank, in) and (out, rank)"
            )
        out[f"{layer}weight"] = (a, b)
    return out


def base_checksum(weights: Iterable[tuple[str, Tensor]]) -> int:
    """Sum, mod 2^32, of a CRC-32 of every weight's name, shape and first elements, the latter rounded to bfloat16.

    Tells models apart, not every bit: that a generator loaded another model than the learner did, or an adapter is
    resumed on another one than it was trained on.
    """
    total = 0
    for name, weight in weights:
        first = weight.detach().flatten()[:_SLICE].to("cpu", torch.bfloat16).view(torch.uint8)
        total += zlib.crc32(first.numpy().tobytes(), zlib.crc32(f"{name}{tuple(weight.shape)}".encode()))
    return total % 2**32
