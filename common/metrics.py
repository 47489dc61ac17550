"""Where a run's metrics go: `metrics.jsonl` in the run folder, trackers (`common.tracking`), or anything with the same
two methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class MetricSink(Protocol):
    """Takes one flat record of numbers per optimizer step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line, flushed at once so that a reader (or a crash) never sees half a step. Half a line that
    a full disk left at the end is taken away, or the next record would be lost with it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
