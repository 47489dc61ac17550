"""A learner's tensors on their way into a checkpoint and out of it: the same files whatever wrote or reads them.

`Capture` is the copy in rank 0's memory from which a thread writes while training goes on; it takes 12 bytes a
parameter. `Stored` is a checkpoint as all ranks see it: one of them reads, the others get what it sends, so that only
one needs the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from common.lora import Adapter
from learner import rng, tensorfile
from learner.checkpoint import Folder, State
from learner.fragments import MOMENTS, WEIGHT, Fragments

POLICY, ADAPTER, CRITIC = "policy", "adapter", "critic"
RNG = "rng.safetensors"
MODEL = "model/model.safetensors"
_MODEL = {POLICY: MODEL, ADAPTER: "adapter/adapter_model.safetensors", CRITIC: "critic/model.safetensors"}
_MOMENT = {
    POLICY: "optimizer/{}.safetensors",
    ADAPTER: "optimizer/{}.safetensors",
    CRITIC: "critic/{}.safetensors",
}
_LACKS = {
    POLICY: "learner.lora: null, but {} holds an adapter; resume with the learner.lora it was made with",
    ADAPTER: "learner.lora: set, but {0} holds a whole model; resume without it, or start anew from {0}/model",
    CRITIC: "objective.advantage.type: 'gae', but {} holds no critic; resume with 'group', or start anew",
}


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

    def check(self, engines: Mapping[str, Fragments], adapter: Adapter | None) -> None:
        """Raises ConfigError, on every rank, where it was made for another model or without a critic or an adapter."""
        for engine, fragments in engines.items():
            where = "learner.lora or model.path" if engine == ADAPTER else "model.path"
            for file in files_of(engine).values():
                if file not in self.shapes:
                    raise ConfigError(_LACKS[engine].format(self.name))
                found, wanted = self.shapes[file], {name: list(fragments.shape(name)) for name in fragments.parameters}
                if wrong := sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name)):
                    raise ConfigError(
                        f"{where}: {self.name} was made for another: in {file} {wrong[0]} is of shape "
                        f"{found.get(wrong[0])}, in the model {wanted.get(wrong[0])}; resume with its own"
                    )
        if adapter is not None and (was := Adapter(**(self.state.adapter or {}))) != adapter:  # type: ignore[arg-type]
            wrong_one = "learner.lora.alpha" if was.base == adapter.base else "model.path"
            raise ConfigError(
                f"{wrong_one}: the adapter of {self.name} was trained with another: {was}, here {adapter}; resume with "
                "its own"
            )

    def load(self, engines: Mapping[str, Fragments], seed: int) -> None:
        """Bring everything, once `check`ed, into the engines and this rank's random generators. Every rank calls it."""
        for engine, fragments in engines.items():
            fragments.make_state(self.state.steps[engine])
            for kind, file in files_of(engine).items():
                with self._reader(file) as read:
                    fragments.spread(kind, read, self.source)
            fragments.publish()
        rows = {
            name: torch.empty(shape, dtype=torch.uint8, device=_device()) for name, shape in self.shapes[RNG].items()
        }

        with self._reader(RNG) as read:
            for name, row in rows.items():
                if read is not None:
                    row.copy_(read(name))
                dist.broadcast(row, src=self.source)
        rng.restore({name: row.cpu() for name, row in rows.items()}, seed, self.state.version)

    @contextmanager
    def _reader(self, file: str) -> Iterator[Callable[[str], Tensor] | None]:
        """Reads the file's tensors, one at a time; None on ranks that do not read."""
        if self.folder is None:
            yield None
            return
        with safe_open(self.folder / file, framework="pt") as tensors:
            yield tensors.get_tensor


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def small_files(folder: Path, under: str) -> dict[str, bytes]:
    """What lies in a folder, by its name under `under`: config and tokenizer beside the weights."""
    return {f"{under}/{path.relative_to(folder)}": path.read_bytes() for path in _files(folder)}


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
