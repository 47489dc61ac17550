"""Checkpoints of a run: `checkpoints/step-00000020/` with three or four things in it.

- `model/`: Hugging Face format (safetensors, config, tokenizer); `transformers` and vLLM load it unchanged;
- `deepspeed/`: the engine's own state (optimizer, master weights) for resuming at the same number of ranks;
- `critic/`: the same of the critic's engine, where the objective has one;
- `state.json`: policy version, epoch of the learner that wrote it, and ids of the groups whose effect is in these
  weights but may not be acknowledged to the broker.

A checkpoint is written beside its final place, synced, and made current by one rename; a crash leaves the previous one
usable, and half-written folders are removed at the next save. A learner that was replaced, but still writes, does not
come before its successor: the newer epoch is the newer checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError, FencedError

_PREFIX, _PARTIAL = "step-", "partial-"


@dataclass(frozen=True)
class State:
    """What a resumed learner must know besides tensors."""

    version: int
    ranks: int
    groups: tuple[str, ...]
    epoch: int = 0


def folder_for(root: Path, version: int) -> Path:
    return root / f"{_PREFIX}{version:08d}"


def partial_for(root: Path, version: int) -> Path:
    """Where a checkpoint is written before `commit`."""
    return root / f"{_PARTIAL}{version:08d}"


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`. ConfigError as `read_state`."""
    return next(reversed(_by_age(root)), None)


def _by_age(root: Path) -> list[Path]:
    complete = []
    for path in root.glob(f"{_PREFIX}*"):
        try:
            complete.append((read_state(path).epoch, path))
        except ConfigError:
            if (path / "state.json").is_file():  # else incomplete, or removed at this moment
                raise
    return [path for _, path in sorted(complete)]


def read_state(folder: Path) -> State:
    """Raises ConfigError where the checkpoint's state cannot be read."""
    try:
        data = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        groups = tuple(data["groups"])
        return State(int(data["version"]), int(data["ranks"]), groups, int(data.get("epoch", 0)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: state.json cannot be read ({error}); resume from another checkpoint") from None


def require_newest(root: Path, state: State | None) -> None:
    """To be called when `Broker.begin` has fenced the older learners, with the state restored before it (None: none).

    Raises:
        FencedError: one of them made a newer checkpoint meanwhile, and settled groups these weights do not contain.
    """
    folder = newest(root)
    if folder is not None and read_state(folder) != state:
        raise FencedError(f"{folder} was written while an older checkpoint was being loaded; start again with --resume")


def prepare(root: Path, version: int) -> Path:
    """An empty folder to write the checkpoint of `version` into; what a crash left behind goes."""
    for leftover in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)
    partial = partial_for(root, version)
    partial.mkdir(parents=True)
    return partial


def commit(root: Path, state: State, keep: int) -> Path:
    """Make the checkpoint written into `partial_for(root, state.version)` the current one; keep the newest `keep`.

    Raises:
        FencedError: a newer learner has written this version already.
    """
    partial, final = partial_for(root, state.version), folder_for(root, state.version)
    (partial / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    if final.exists():  # a resumed run reached the same version again
        if (final / "state.json").is_file() and read_state(final).epoch > state.epoch:
            raise FencedError(f"{final} is a newer learner's; this one (epoch {state.epoch}) was replaced")
        shutil.rmtree(final)
    partial.rename(final)
    _sync(root)
    for old in _by_age(root)[:-keep]:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
