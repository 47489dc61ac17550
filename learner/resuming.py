"""Which checkpoint a learner resumes from: the newest one that is whole, wherever it lies, whoever can read it.

Every rank looks, since a snapshot may be on one node's own disk. The rank that finds the newest reads all of it and
compares checksums before anything is loaded; a broken one is named and left out, and the next one is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import wire
from common.errors import ConfigError, FencedError
from common.log import Logger
from learner import checkpoint, ranks, tensorfile
from learner.capture import Stored
from learner.checkpoint import State

_NOTHING = (-1, -1)


def choose(roots: Sequence[Path], log: Logger) -> Stored | None:
    """The newest whole checkpoint under `roots`, of all that any rank sees; None: there is none. Every rank calls it
    and gets the same one."""
    candidates = [((epoch, version), path) for epoch, version, path in checkpoint.ages(*roots)]
    for path in checkpoint.everything(*roots) if dist.get_rank() == 0 else ():
        if path not in {found for _, found in candidates}:
            log.warning("%s is skipped: %s", path, checkpoint.broken(path))
    while True:
        ages = _told(candidates[-1][0] if candidates else _NOTHING)
        if max(ages) == _NOTHING:
            return None
        source = ages.index(max(ages))
        reads = dist.get_rank() == source
        # Hundreds of gigabytes take minutes to compare.
        make = partial(_offer, candidates[-1][1]) if reads else None
        offer = wire.unpack(ranks.broadcast_made(make, source), "checkpoint")
        name, problem = str(offer["name"]), str(offer["problem"])
        if not problem:
            folder = candidates[-1][1] if reads else None
            state = State(**{**offer["state"], "groups": tuple(offer["state"]["groups"])})
            return Stored(name, state, offer["shapes"], source, folder)
        if reads:
            log.warning("%s is skipped: %s", name, problem)
        candidates = [each for each in candidates if str(each[1]) != name]


def require_newest(roots: Sequence[Path], state: State | None) -> None:
    """As `checkpoint.require_newest`, over what every rank sees. Every rank calls it, once rank 0 has begun."""
    problem = b""
    try:
        checkpoint.require_newest(state, *roots)
    except FencedError as error:
        problem = str(error).encode()
    for rank in range(dist.get_world_size()):
        if said := ranks.broadcast(problem if rank == dist.get_rank() else None, rank):
            raise FencedError(said.decode())


def _offer(folder: Path) -> bytes:
    """What the others must know of a checkpoint, after every byte of it was compared."""
    offer: dict[str, Any] = {"name": str(folder), "problem": checkpoint.broken(folder)}
    if not offer["problem"]:
        try:
            tensors = [name for name in checkpoint.files(folder) if name.endswith(".safetensors")]
            offer["shapes"] = {name: tensorfile.shapes(folder / name) for name in tensors}
            offer["state"] = json.loads(json.dumps(asdict(checkpoint.read_state(folder))))
        except (ConfigError, OSError) as error:  # removed at this moment
            offer["problem"] = str(error)
    return wire.pack("checkpoint", offer)


def _told(age: tuple[int, int]) -> list[tuple[int, int]]:
    """What every rank says, by rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found = [torch.empty(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(age, dtype=torch.int64, device=device))
    return [(int(epoch), int(version)) for epoch, version in (each.tolist() for each in found)]
