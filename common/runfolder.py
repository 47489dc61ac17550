"""A run's folder: what lies in it (`LAYOUT`, from which `docs/run-folder.md` is written) and what can be told from it.

Nothing here needs the run's server, nor that the run goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from common import environment
from common.errors import ConfigError

METRICS = "metrics.jsonl"

# Every entry of a run's folder, and where it helps what lies in it; `<n>` stands for a number.
LAYOUT: dict[str, str] = {
    "config.yaml": "the configuration as resolved when the run last started",
    "environment.json": (
        "what the learner ran with: host, versions of Headrace, Python and every installed package, commit and `dirty` "
        "where it ran from a checkout, GPUs; an entry for every start that found something else than the one before"
    ),
    "logs/": "one log per process, of runs started with `headrace up`",
    METRICS: "one record per policy version, see [metrics](metrics.md)",
    "eval.jsonl": "one record per evaluation during training",
    "tensorboard/": "the same for TensorBoard, unless `tracking.trackers` leaves it out",
    "tracking/": (
        "of other trackers: the last step each was given, W&B's files, with `tracking.offline` MLflow's database"
    ),
    "checkpoints/step-<n>/": "what the run can be resumed from, see below",
    "snapshots/step-<n>/": "the same, more often, unless `learner.snapshot_folder` names another place",
    "redis/": "data, password and log of the server that `up` started",
    "page.url": "where the live page is, while it is served",
    "audit.json": "the ledger at the end of the run, or of its last part",
}

State = Literal["complete", "stopped", "active", "silent", "damaged"]
# The states in words, for the docs.
STATES: dict[State, str] = {
    "complete": "its last step is recorded",
    "stopped": "`headrace up` ended it before that, in order: `audit.json` is newer than the last record",
    "active": "something was written in the last 15 minutes",
    "silent": "nothing was: its processes are gone, or hang",
    "damaged": "a file cannot be read; the line below the table says which",
}
_ACTIVE_S = 900.0

Record = dict[str, float]


def records(path: Path) -> list[Record]:
    """The records of a file of metrics that are still true: where a run was resumed, a step comes a second time, and
    takes back what was recorded from there on. A last line without its end is still being written, or a crash cut it
    off, and is left out. Empty where there is no file.

    Raises:
        ConfigError: a line is no record; names file and line.
    """
    kept: list[Record] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return kept
    for number, line in enumerate(lines[:-1], 1):
        record = _record(line, f"{path}, line {number}")
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: not JSON ({line[:60]!r}); expected one record, or no such line") from None
    if not isinstance(record, dict) or not _number(record.get("step")):
        raise ConfigError(f"{where}: {line[:60]!r} has no number as its step; expected a record of metrics")
    return {name: float(value) for name, value in record.items() if _number(value)}


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Run:
    """One run, as its folder shows it. Its properties raise ConfigError where a file is damaged."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The sections of `config.yaml`."""
        path = self.folder / environment.CONFIG
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict) or not isinstance(tree.get("run"), dict):
            raise ConfigError(f"{path}: has no section run; expected a run's configuration")
        return tree

    @property
    def name(self) -> str:
        return str(self.config["run"].get("name", "-"))

    @cached_property
    def records(self) -> list[Record]:
        return records(self.folder / METRICS)

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        return environment.read(self.folder)

    @property
    def started(self) -> str | None:
        """When its learner first started, in UTC; None: an older run, which did not note it."""
        return str(self.environments[0].get("since")) if self.environments else None

    @property
    def steps(self) -> int:
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def max_steps(self) -> int | None:
        value = self.config.get("learner", {}).get("max_steps")
        return value if isinstance(value, int) else None

    def state(self, now: float | None = None) -> State:
        """See `STATES`; `now` in seconds since 1970."""
        if self.max_steps is not None and self.steps >= self.max_steps:
            return "complete"
        audit, metrics = _modified(self.folder / "audit.json"), _modified(self.folder / METRICS)
        newest = self.written_at
        if audit and audit >= metrics and audit >= newest - 1:  # a resumed run writes again
            return "stopped"
        return "active" if (time.time() if now is None else now) - newest < _ACTIVE_S else "silent"

    @property
    def written_at(self) -> float:
        """When its processes last wrote, in seconds since 1970."""
        return max((_modified(path) for path in self._written()), default=0.0)

    def _written(self) -> Iterator[Path]:
        yield from (self.folder / name for name in (environment.CONFIG, METRICS, "eval.jsonl"))
        yield from (self.folder / "logs").glob("*.log")

    def saved(self) -> list[Path]:
        """Its checkpoints, then its snapshots in its folder, each by step."""
        return [path for kind in ("checkpoints", "snapshots") for path in sorted((self.folder / kind).glob("step-*"))]


def find(folder: Path) -> list[Run]:
    """The runs in `folder`, the one that was written to last first.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected one that holds a folder per run")
    found = [Run(path) for path in folder.iterdir() if (path / environment.CONFIG).is_file()]
    return sorted(found, key=lambda run: (-run.written_at, run.folder.name))


def named(run: str, folder: Path) -> Run:
    """The run at the path `run`, or of that id in `folder`.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(run), folder / run):
        if (path / environment.CONFIG).is_file():
            return Run(path)
    known = ", ".join(each.id for each in find(folder)[:5]) if folder.is_dir() else ""
    expected = f"expected one of: {known}" if known else "there is none"
    raise ConfigError(f"RUN: {run!r} is no run's folder, nor an id in {folder}; {expected}")


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of sections by dotted field."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
