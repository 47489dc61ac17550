"""Where a run's metrics go: `metrics.jsonl` in the run folder, TensorBoard, or anything with the same two methods."""

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
    """One JSON object per line, flushed at once so that a reader (or a crash) never sees half a step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard scalars under `train/`, or another prefix. A folder takes one process: of several that write at once
    TensorBoard would read but one."""

    def __init__(self, folder: Path, prefix: str = "train") -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._prefix = SummaryWriter(str(folder)), prefix

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
