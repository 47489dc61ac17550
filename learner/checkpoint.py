"""Checkpoints and snapshots of a run: folders `step-00000020/` of one format, which knows neither ranks nor ZeRO.

- `model/`: config, tokenizer, and the float32 master weights as `model.safetensors`; `transformers` and vLLM load it;
- `optimizer/exp_avg.safetensors` and `exp_avg_sq.safetensors`: AdamW's moments, float32, whole tensors by parameter;
- with `learner.lora`, in place of `model/`: `adapter/`, in PEFT's format, to which the moments then belong;
- `critic/`: the same of the critic, where the objective has one;
- `rng.safetensors`: states of the random generators, a row per rank;
- `state.json`: `State`, with size and SHA-256 of every file, its own contents included.

Promise: `save` writes beside the final place, syncs every file and folder, and makes the result current by one rename;
a crash or a full disk at any byte leaves what was there before. What a crash left half-written goes at the next save.
A learner that was replaced, but still writes, does not come before its successor: the newer epoch is the newer
checkpoint. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, FencedError

STATE = "state.json"
_PREFIX, _REPLACED, _PARTIAL = "step-", "replaced-", "partial-"
_CHUNK = 1 << 24


@dataclass(frozen=True)
class State:
    """What a resumed learner must know besides tensors.

    Attributes:
        version: the policy version, from which the learning rate's schedule follows, too.
        ranks: how many wrote it; any number may read it.
        groups: ids of groups whose effect is in these weights but may not be acknowledged to the broker.
        epoch: of the learner that wrote it.
        position: prompts of the source that were ever released. The broker owns it; here it tells whether a server
            has lost what it knew.
        steps: optimizer updates made, by engine: `policy`, and `critic` where there is one.
        counters: metrics that go on counting in a resumed run.
        adapter: fields of `common.lora.Adapter`; None: the whole model was trained.
    """

    version: int
    ranks: int
    groups: tuple[str, ...]
    epoch: int = 0
    position: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    adapter: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Written:
    """A file of a checkpoint: bytes, and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


class Folder:
    """A checkpoint that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Written] = {}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the file `name` (with `/` for folders) and sync it. Raises OSError."""
        path, digest, size = self.path / name, hashlib.sha256(), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = Written(size, digest.hexdigest())


def folder_for(root: Path, version: int) -> Path:
    return root / f"{_PREFIX}{version:08d}"


def save(
    root: Path, state: State, fill: Callable[[Folder], None], keep: int, hold: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint and make it current; keep the newest `keep` under `root`.

    Args:
        root: the folder of checkpoints.
        state: all but the list of files.
        fill: writes the files.
        keep: how many to keep, this one included.
        hold: raises FencedError where this learner was replaced; called when all is written, right before the rename.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: it could not be written; nothing under `root` has changed.
        FencedError: as `hold`, or a newer learner has written this version already.
    """
    root.mkdir(parents=True, exist_ok=True)
    _tidy(root, state.epoch)
    partial = root / f"{_PARTIAL}{state.version:08d}.{state.epoch}"
    try:
        partial.mkdir()
        folder = Folder(partial)
        fill(folder)
        (partial / STATE).write_bytes(_encode(state, folder.files))
        for path in (partial / STATE, *(each for each in partial.rglob("*") if each.is_dir()), partial):
            _sync(path)
        hold()
        final = folder_for(root, state.version)
        replaced = _move_aside(final, state)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(root)
    for old in (*replaced, *by_age(root)[:-keep]):
        _remove(old)
    return final


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the next `_tidy` goes on with it
        going = folder.rename(folder.with_name(f"{_PARTIAL}{folder.name}.0"))
        shutil.rmtree(going)


def _tidy(root: Path, epoch: int) -> None:
    """What a crash of this learner, or of an older one, left behind goes; a newer one's work stays."""
    for leftover in root.glob(f"{_PARTIAL}*"):
        of = leftover.name.rpartition(".")[2]
        if not of.isdigit() or int(of) <= epoch:
            shutil.rmtree(leftover, ignore_errors=True)


def _move_aside(final: Path, state: State) -> list[Path]:
    """A resumed run reaches a version again: what is in the way stays usable until the new one is in its place."""
    if not final.exists():
        return []
    with contextlib.suppress(ConfigError):
        if read_state(final).epoch > state.epoch:
            raise FencedError(f"{final} is a newer learner's; this one (epoch {state.epoch}) was replaced")
    return [final.rename(final.with_name(f"{_REPLACED}{state.version:08d}.{state.epoch}"))]


def newest(*roots: Path) -> Path | None:
    """The newest checkpoint under any of `roots` that can be read; its files may still be broken, see `broken`."""
    return next(reversed(by_age(*roots)), None)


def by_age(*roots: Path) -> list[Path]:
    """All whose state can be read, the oldest first: by epoch, then by version."""
    return [path for *_, path in ages(*roots)]


def ages(*roots: Path) -> list[tuple[int, int, Path]]:
    """The same, with epoch and version."""
    found = []
    for path in everything(*roots):
        with contextlib.suppress(ConfigError):  # broken, or removed at this moment
            state = read_state(path)
            found.append((state.epoch, state.version, path))
    return sorted(found)


def everything(*roots: Path) -> list[Path]:
    """All folders that claim to be a checkpoint, broken ones included, by root and name."""
    return [path for root in roots for prefix in (_PREFIX, _REPLACED) for path in sorted(root.glob(f"{prefix}*"))]


def read_state(folder: Path) -> State:
    """Raises ConfigError where the checkpoint's state cannot be read."""
    return _read(folder)[0]


def files(folder: Path) -> dict[str, Written]:
    """What the checkpoint consists of, but for its state. ConfigError as `read_state`."""
    return _read(folder)[1]


def broken(folder: Path) -> str:
    """What is wrong with a checkpoint, '' if nothing: every file is there and holds the bytes that were written."""
    try:
        expected = files(folder)
        for name, written in expected.items():
            size, sha256 = _measure(folder / name, written.size)
            if size != written.size:
                return f"{name} has {size} bytes, {written.size} were written"
            if sha256 != written.sha256:
                return f"{name} does not hold what was written (SHA-256 {sha256[:12]}…, not {written.sha256[:12]}…)"
    except ConfigError as error:
        return str(error).removeprefix(f"{folder}: ").split("; ")[0]
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror or error})"
    return ""


def require_newest(state: State | None, *roots: Path) -> None:
    """To be called when `Broker.begin` has fenced the older learners, with the state restored before it (None: none).

    Raises:
        FencedError: one of them made a newer checkpoint meanwhile, and settled groups these weights do not contain.
    """
    begun = (state.epoch, state.version) if state is not None else (-1, -1)
    for epoch, version, folder in reversed(ages(*roots)):
        if (epoch, version) > begun and not broken(folder):
            raise FencedError(f"{folder} was written while an older checkpoint was being loaded; start with --resume")


def _measure(path: Path, expected: int) -> tuple[int, str]:
    """Size and SHA-256 of a file; of one that has another size than expected only that."""
    size, digest = path.stat().st_size, hashlib.sha256()
    if size == expected:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return size, digest.hexdigest()


def _encode(state: State, written: Mapping[str, Written]) -> bytes:
    body = {**asdict(state), "files": {name: asdict(each) for name, each in sorted(written.items())}}
    return json.dumps({**body, "sha256": _fingerprint(body)}, indent=1).encode()


def _fingerprint(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> tuple[State, dict[str, Written]]:
    try:
        body = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if body.pop("sha256") != _fingerprint(body):
            raise ValueError("it does not hold what was written")
        written = {name: Written(**each) for name, each in body.pop("files").items()}
        return State(**{**body, "groups": tuple(body["groups"])}), written
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder}: {STATE} cannot be read ({why}); resume from another checkpoint") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
