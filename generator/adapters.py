"""A generator's end of LoRA: whole weights, to be loaded like any others, from the base and a received adapter.

Why not vLLM's own LoRA: there a request belongs to an adapter from its first token to its last, while here weights
change under requests in flight; and every token would pay for the adapter's products. Merged weights go the way that
whole ones go, with its stamping, checksums and pauses.

What it promises: an adapter that does not fit, or belongs to another base, is an error before anything is loaded. The
base is read again for every update, a tensor at a time, so that no second copy of it is kept. Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from common.errors import WireError
from common.lora import Adapter, base_checksum, merged, pairs


class Base:
    """The weights that adapters are added to.

    Args:
        read: all of them under their Hugging Face names; may be called any number of times.
        dtype: of what is merged.
        device: where it is merged.
    """

    def __init__(
        self, read: Callable[[], Iterable[tuple[str, Tensor]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._read, self._dtype, self._device = read, dtype, device
        self._checked: tuple[int, dict[str, torch.Size]] | None = None

    def merged(self, factors: Mapping[str, Tensor], adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        """All weights, those with factors merged.

        Raises:
            WireError: here, not while iterating: factors that do not fit the base, or are another base's.
        """
        found = pairs(factors)
        self._check(found, adapter)
        return self._sums(found, adapter.scale)

    def _sums(self, found: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._read():
            if name in found:
                a, b = found[name]
                weight = merged(weight.to(self._device), a.to(self._device), b.to(self._device), scale).to(self._dtype)
            yield name, weight

    def _check(self, found: Mapping[str, tuple[Tensor, Tensor]], adapter: Adapter) -> None:
        if self._checked is None or self._checked[1].keys() != found.keys():
            shapes: dict[str, torch.Size] = {}

            def seen() -> Iterator[tuple[str, Tensor]]:
                for name, weight in self._read():
                    if name in found:
                        shapes[name] = weight.shape
                        yield name, weight

            checksum = base_checksum(seen())
            if missing := sorted(found.keys() - shapes):
                raise WireError(f"adapter: the model here has no weight {missing[0]!r:.120}")
            self._checked = checksum, shapes
        checksum, shapes = self._checked
        for name, (a, b) in found.items():
            if shapes[name] != (len(b), a.shape[1]):
                raise WireError(
                    f"adapter: {name} is {tuple(shapes[name])} here, the product of its factors "
                    f"{(len(b), a.shape[1])}; learner and generators must use the same model.path"
                )
        if checksum != adapter.base:
            raise WireError(
                f"adapter: it belongs to a base of checksum {adapter.base:08x}, the model here has {checksum:08x}; "
                "learner and generators must use the same model.path"
            )
