"""States of the random generators, per rank: in a checkpoint, and out of it at any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def gather() -> dict[str, Tensor]:
    """The states of all ranks' generators, (ranks, bytes) uint8 by device type, on the CPU. Every rank calls it."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    rows = {}
    for name, state in states.items():
        found = [torch.empty_like(state, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(found, state.to(device))
        rows[name] = torch.stack(found).cpu()
    return rows


def restore(rows: Mapping[str, Tensor], seed: int, version: int) -> None:
    """This rank's generators as they were. One that had none, since there were fewer ranks, or another device, is
    seeded by the run's seed, the version and its rank: the same again when the same is done again."""
    rank = dist.get_rank()
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {version} {rank}".encode()).digest()[:7]))
    if rank < len(rows.get("cpu", ())):
        torch.set_rng_state(rows["cpu"][rank].clone())  # a view it would read from its storage's start
    if rank < len(rows.get("cuda", ())) and torch.cuda.is_available():
        torch.cuda.set_rng_state(rows["cuda"][rank].clone())
