"""What the data-parallel ranks say to each other: rank 0 hands every rank its share of a step as bytes.

Bytes are msgpack (see `common.wire`), not pickled objects; a rank receives its own share only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import torch
import torch.distributed as dist

# Rank 0 sends at least a "wait" message this often, so that a dead rank 0 is noticed in time and a slow stream is not
# mistaken for one.
IDLE_S = 20.0
_TIMEOUT = timedelta(seconds=300)


def init(backend: str) -> None:
    """Join torchrun's group. Done before DeepSpeed and without `device_id`, or weight sync can hang."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=_TIMEOUT)


def scatter(shares: Sequence[bytes] | None) -> bytes:
    """Rank 0 gives one byte string per rank; every rank gets its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = torch.zeros(world, dtype=torch.int64)
    if shares is not None:
        sizes = torch.tensor([len(share) for share in shares], dtype=torch.int64)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    sizes = sizes.to(device)
    dist.broadcast(sizes, src=0)
    own = torch.empty(int(sizes.max()), dtype=torch.uint8, device=device)
    rows = None
    if shares is not None:
        rows = [torch.zeros_like(own) for _ in range(world)]
        for row, share in zip(rows, shares, strict=True):
            if share:
                row[: len(share)] = torch.frombuffer(bytearray(share), dtype=torch.uint8).to(device)
    dist.scatter(own, rows, src=0)
    return own[: int(sizes[rank])].cpu().numpy().tobytes()


def broadcast(data: bytes | None, source: int) -> bytes:
    """Rank `source` gives a byte string, every rank gets it."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    size = torch.tensor(0 if data is None else len(data), dtype=torch.int64, device=device)
    dist.broadcast(size, src=source)
    if not size:
        return b""
    row = torch.empty(int(size), dtype=torch.uint8, device=device)
    if data is not None:
        row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(row, src=source)
    return row.cpu().numpy().tobytes()


def broadcast_made(make: Callable[[], bytes] | None, source: int) -> bytes:
    """What `make` gives on rank `source`, a byte string that is not empty, and which may take longer than a collective
    may: meanwhile the rank says now and then that it is still at it."""
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(make) if make is not None else None
        while True:
            data = None
            if making is not None:
                wait([making], IDLE_S)
                data = making.result() if making.done() else b""
            if said := broadcast(data, source):
                return said


def anybody(says: bool) -> bool:
    """Whether any rank says so. Every rank calls it."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    flag = torch.tensor(int(says), dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
