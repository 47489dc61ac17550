"""What `headrace doctor` asks of a learner's machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from common.config import Config
from common.doctor import Finding, fault, ok, warning
from common.weightwire import resolve_backend
from learner import choices
from learner.checks import check


def settings(config: Config) -> Iterator[Finding]:
    """Do the learner's section and this machine go together?"""
    check(config)
    yield ok("learner", f"{config.learner.ranks} ranks, ZeRO {config.learner.zero_stage}, {choices.chosen(config)}")


def model(config: Config) -> Iterator[Finding]:
    """Are all files of the model there? One on the hub is left to its download."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        yield warning("model", f"model.path {config.model.path!r} is no folder: it comes from the hub")
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        shards = {path.name for path in folder.glob("*.safetensors")} or {"model.safetensors"}
    missing = sorted(name for name in ("config.json", *shards) if not (folder / name).is_file())
    if missing:
        yield fault("model", f"model.path {folder}: {', '.join(missing[:3])} missing")
        return
    broken = [f"{folder / name} {wrong}" for name in sorted(shards) if (wrong := _wrong_with(folder / name))]
    if broken:
        yield fault("model", f"{broken[0]}; fetch it again")
    else:
        yield ok("model", f"{folder}: all {len(shards)} files of weights are whole")


def _wrong_with(path: Path) -> str:
    """What is wrong with a safetensors file, judged by its header and its size; nothing: an empty string."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < size else b""
    try:
        entries = [entry for key, entry in json.loads(header).items() if key != "__metadata__"]
        whole = 8 + length + max(entry["data_offsets"][1] for entry in entries)
    except (ValueError, KeyError, TypeError):
        return "is no safetensors file"
    return "" if size >= whole else f"is cut off ({size} of {whole} bytes)"


def devices(config: Config) -> Iterator[Finding]:
    """GPUs, where there are any, and what NCCL needs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if shutil.which("nvidia-smi"):
            yield fault("gpu", f"nvidia-smi is here, but torch {torch.__version__} sees no GPU")
        else:
            yield ok("gpu", "none; gloo on CPUs")
        return
    ranks, parallel = config.learner.ranks, config.generator.tensor_parallel_size
    wanted = f"learner.ranks {ranks}, generator.tensor_parallel_size {parallel}"
    if count < min(ranks, parallel):
        yield fault("gpu", f"{count} GPUs for {wanted}: too few for either")
    elif count < max(ranks, parallel):
        enough = "generator" if count >= parallel else "learner"
        yield warning("gpu", f"{count} GPUs for {wanted}: enough for the {enough}")
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}: {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield Finding("ok" if free > 0.8 * total else "warning", "gpu", text)
    if resolve_backend(config.weights.backend) == "nccl":
        yield from _nccl()


def _nccl() -> Iterator[Finding]:
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name for _, name in socket.if_nameindex()]
    prefixes = [part for part in wanted.lstrip("^=").split(",") if part]
    if wanted and not wanted.startswith("^") and not any(n.startswith(p) for n in names for p in prefixes):
        yield fault("nccl", f"NCCL_SOCKET_IFNAME is {wanted!r}; the interfaces here are {', '.join(names)}")
    else:
        yield ok("nccl", f"interfaces {', '.join(names)}")


def port(config: Config) -> Iterator[Finding]:
    """Can the learner listen where generators look for it?"""
    host = config.weights.host
    if host is None:
        yield ok("weights.host", "the address from which the learner reaches Redis")
        return
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError as error:
        yield warning("weights.host", f"{host} is no address of this machine ({error.strerror})")
    else:
        yield ok("weights.host", f"a learner here could listen on {host}")
