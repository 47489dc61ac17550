"""A checksum over a sample of the weights, so that a receiver can tell in milliseconds that it has what was sent.

Whole models take too long for every update: a CRC of 14 GB is ten seconds of a core. So a slice of every tensor is
taken, at a place that differs from version to version, in all at most `_LIMIT` bytes (or `_LEAST` a tensor). A tensor
that is missing, swapped, shifted, cut off or of another version shows at once; a single flipped bit with the share that
is sampled: TCP and InfiniBand guard against those.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import torch

from common.weightwire import Slot

_LIMIT = 8 << 20
_LEAST, _MOST = 256, 64 << 10  # bytes of one slice


def sampled_checksum(plan: Sequence[Sequence[Slot]], buckets: Sequence[torch.Tensor], version: int) -> int:
    """CRC-32 over a slice of every tensor of `plan` in its bucket (uint8); `version` chooses the places."""
    rng = random.Random(version)
    tensors = sum(len(slots) for slots in plan)
    most = max(_LEAST, min(_MOST, _LIMIT // max(1, tensors)))
    checksum = 0
    for slots, bucket in zip(plan, buckets, strict=True):
        data = bucket.numpy().data
        for slot in slots:
            length = min(slot.parameter.nbytes, most)
            start = slot.offset + rng.randint(0, slot.parameter.nbytes - length)
            checksum = zlib.crc32(data[start : start + length], checksum)
    return checksum
