"""Safetensors files, written a tensor at a time so that nothing is copied and the checksum is of what memory held.

The format (https://huggingface.co/docs/safetensors): the header's length as 8 bytes, little endian; the header, JSON
from name to dtype, shape and place; the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.uint8: "U8"}


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file of these tensors, on the CPU and contiguous, of a dtype in `_NAMES`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.view(-1).view(torch.uint8).numpy().data


def shapes(path: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a file, as they lie in it."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
