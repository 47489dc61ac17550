"""A learner's tensors on their way into a checkpoint and out of it: the same files whatever wrote or reads them.

`Capture` is the copy in rank 0's memory from which a thread writes while training goes on; it takes 12 bytes a
parameter. `Stored` is a checkpoint as all ranks see it: one of them reads, the others get what it sends, so that only
one needs the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from learner import rng, tensorfile
from learner.checkpoint import Folder, State
from learner.fragments import MOMENTS, WEIGHT, Fragments

POLICY, CRITIC = "policy", "critic"
RNG = "rng.safetensors"
MODEL = "model/model.safetensors"
_MODEL = {POLICY: MODEL, CRITIC: "critic/model.safetensors"}
_MOMENT = {POLICY: "optimizer/{}.safetensors", CRITIC: "critic/{}.safetensors"}


def files_of(engine: str) -> dict[str, str]:
    """Kind to file, for the tensors of an engine."""
    return {WEIGHT: _MODEL[engine], **{moment: _MOMENT[engine].format(moment) for moment in MOMENTS}}


@dataclass(frozen=True)
class Capture:
    """Everything a checkpoint holds but its state: tensors by file, small files as they are; `steps` by engine."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]
    steps: Mapping[str, int]

    def write(self, folder: Folder) -> None:
        """Raises OSError."""
        for name, text in self.texts.items():
            folder.write(name, [text])
        for name, tensors in self.tensors.items():
            folder.write(name, tensorfile.chunks(tensors))


def capture(engines: Mapping[str, Fragments], texts: Mapping[str, bytes]) -> Capture | None:
    """A copy of all engines on rank 0, None on the others. Every rank calls it."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for engine, fragments in engines.items():
        for kind, file in files_of(engine).items():
            whole = fragments.gather(kind)
            tensors[file] = {name: tensor for name, tensor in whole if tensor is not None}
    tensors[RNG] = rng.gather()
    if dist.get_rank() != 0:
        return None
    return Capture(tensors, texts, {engine: fragments.step for engine, fragments in engines.items()})


@dataclass(frozen=True)
class Stored:
    """A checkpoint that is being loaded.

    Attributes:
        name: for messages.
        state: what it says about itself.
        shapes: of every tensor, by file and name.
        source: the rank that reads it.
        folder: where it is; None on the other ranks.
    """

    name: str
    state: State
    shapes: Mapping[str, Mapping[str, list[int]]]
    source: int
    folder: Path | None

    def check(self, engines: Mapping[str, Fragments]) -> None:
        """Raises ConfigError, on every rank, where it was made for another model or without a critic."""
        for engine, fragments in engines.items():
            for file in files_of(engine).values():
                if file not in self.shapes:
                    raise ConfigError(
                        f"objective.advantage.type: 'gae', but {self.name} holds no critic; resume with 'group', or "
                        "start anew"
                    )
                found, wanted = self.shapes[file], {name: list(fragments.shape(name)) for name in fragments.parameters}
                if wrong := sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name)):
                    raise ConfigError(
                        f"model.path: {self.name} was made for another model: in {file} {wrong[0]} is of shape "
                        f"{found.get(wrong[0])}, in the model {wanted.get(wrong[0])}; resume with its own model"
                    )

    def load(self, engines: Mapping[str, Fragments], seed: int) -> None:
        """Bring everything into the engines and this rank's random generators. Every rank calls it."""
        self.check(engines)
        for engine, fragments in engines.items():
            fragments.make_state(self.state.steps[engine])
            for kind, file in files_of(engine).items():
                self._read(file, partial(self._spread, fragments, kind))
            fragments.publish()
        rows = {
            name: torch.empty(shape, dtype=torch.uint8, device=_device()) for name, shape in self.shapes[RNG].items()
        }

        def spread(read: Callable[[str], Tensor] | None) -> None:
            for name, row in rows.items():
                if read is not None:
                    row.copy_(read(name))
                dist.broadcast(row, src=self.source)

        self._read(RNG, spread)
        rng.restore({name: row.cpu() for name, row in rows.items()}, seed, self.state.version)

    def _spread(self, fragments: Fragments, kind: str, read: Callable[[str], Tensor] | None) -> None:
        fragments.spread(kind, read, self.source)

    def _read(self, file: str, use: Callable[[Callable[[str], Tensor] | None], None]) -> None:
        """Call `use` with a reader of the file's tensors, one at a time; with None on ranks that do not read."""
        if self.folder is None:
            use(None)
            return
        with safe_open(self.folder / file, framework="pt") as tensors:
            use(tensors.get_tensor)


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def small_files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, by its name under `model/`: config and tokenizer beside the weights."""
    return {f"model/{path.relative_to(folder)}": path.read_bytes() for path in _files(folder)}


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
