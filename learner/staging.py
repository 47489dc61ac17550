"""The staged copy of the published weights: what the learner trains on next must not be what is being sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from common.checksum import sampled_checksum
from common.weightwire import DTYPES, BucketPlanner, Parameter, Slot, bucket_size

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Staged:
    """Weights in host memory, in wire dtype, laid out in buckets of at most `bucket_bytes` (or one larger tensor)."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.plan: list[list[Slot]] = []
        self._buckets: list[torch.Tensor] = []

    def fill(self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
        """Copy the tensors, read once and in order; one that shares its storage with an earlier one is left out."""
        planner = BucketPlanner(self.bucket_bytes)
        self.plan = []
        seen: dict[tuple[int, int, torch.Size], StorageWeakRef] = {}
        with torch.no_grad():
            for name, tensor in named_tensors:
                # The weak reference keeps the storage's identity from going to a later tensor, so that gathered
                # weights, freed one after the other, are not taken for tied ones.
                storage = StorageWeakRef(tensor.untyped_storage())
                key = (storage.cdata, int(tensor.storage_offset()), tensor.shape)
                if seen.setdefault(key, storage) is storage:
                    slot = planner.add(Parameter(name, _NAMES[dtype], tuple(tensor.shape)))
                    slot.view(self._room(slot)).copy_(tensor)
        del self._buckets[len(self.plan) :]

    def _room(self, slot: Slot) -> torch.Tensor:
        """The bucket of a new slot, from the last fill where that is large enough."""
        if slot.bucket == len(self.plan):
            self.plan.append([])
        self.plan[slot.bucket].append(slot)
        if slot.bucket == len(self._buckets):
            self._buckets.append(torch.empty(max(self.bucket_bytes, slot.end), dtype=torch.uint8))
        elif slot.end > len(self._buckets[slot.bucket]):  # larger than a bucket, hence alone in it
            self._buckets[slot.bucket] = torch.empty(slot.end, dtype=torch.uint8)
        return self._buckets[slot.bucket]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(slot.parameter for slots in self.plan for slot in slots)

    @property
    def nbytes(self) -> int:
        return sum(bucket_size(slots) for slots in self.plan)

    def checksum(self, version: int) -> int | None:
        """What a receiver of all of this computes, too."""
        return sampled_checksum(self.plan, self.buckets(), version)

    def buckets(self) -> list[torch.Tensor]:
        """The used part of every bucket, uint8."""
        return [bucket[: bucket_size(slots)] for slots, bucket in zip(self.plan, self._buckets, strict=True)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and views of all parameters, in order."""
        for slots, bucket in zip(self.plan, self._buckets, strict=True):
            for slot in slots:
                yield slot.parameter.name, slot.view(bucket)
