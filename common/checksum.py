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


class SampledChecksum:
    """CRC-32 over a slice of every tensor of `plan`, bucket after bucket (uint8); `version` chooses the places."""

    def __init__(self, plan: Sequence[Sequence[Slot]], version: int) -> None:
        self._version, self._left, self._crc = version, len(plan), 0
        self._rng = random.Random(version)
        self._most = max(_LEAST, min(_MOST, _LIMIT // max(1, sum(len(slots) for slots in plan))))

    def add(self, slots: Sequence[Slot], bucket: torch.Tensor) -> None:
        """The next bucket of the plan, with its slots."""
        data = bucket.numpy().data
        for slot in slots:
            length = min(slot.parameter.nbytes, self._most)
            start = slot.offset + self._rng.randint(0, slot.parameter.nbytes - length)
            self._crc = zlib.crc32(data[start : start + length], self._crc)
        self._left -= 1

    def value(self, version: int) -> int | None:
        """The checksum; None where it is of another version, or buckets are missing."""
        return self._crc if (version, 0) == (self._version, self._left) else None


def sampled_checksum(plan: Sequence[Sequence[Slot]], buckets: Sequence[torch.Tensor], version: int) -> int | None:
    """That of all buckets at once."""
    checksum = SampledChecksum(plan, version)
    for slots, bucket in zip(plan, buckets, strict=True):
        checksum.add(slots, bucket)
    return checksum.value(version)
