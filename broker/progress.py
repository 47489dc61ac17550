"""What `headrace up` shows while a run goes on: a live table on a terminal, else a line per step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from broker.reading import Reading


class MetricsTail:
    """New records of a growing `metrics.jsonl`; what was there before is skipped, unless `from_start`."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if not from_start and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # a last line without its end is still being written
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Progress:
    """The display. `say` prints a line that stays."""

    def __init__(self, console: Console, max_steps: int, generators: int) -> None:
        self._console, self._max_steps, self._generators = console, max_steps, generators
        self._record: Mapping[str, Any] = {}
        self._reading: Reading | None = None
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=2, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def update(self, reading: Reading | None, records: list[dict[str, Any]]) -> None:
        self._reading = reading
        for record in records:
            self._record = record
            if not self._console.is_terminal:
                self.say("  ".join(f"{name} {value}" for name, value in self._cells()))

    def _cells(self) -> list[tuple[str, str]]:
        """(what, value) in the order shown; a dash stands for what is not known yet."""
        record, reading = self._record, self._reading
        cells = [
            ("step", f"{_number(record, 'step', '.0f')}/{self._max_steps}"),
            ("version", _number(record, "version", ".0f")),
            ("reward", _number(record, "reward_mean", ".3f")),
            ("accuracy", _number(record, "sampled_accuracy", ".3f")),
            ("tokens/s", _number(record, "tokens_per_s", ".0f")),
            ("staleness", _number(record, "staleness_max", ".0f")),
        ]
        if reading is not None:
            serving = sum(member.state == "serving" for member in reading.in_role("generator"))
            cells += [
                ("queue", str(reading.queues.groups_waiting)),
                ("outstanding", str(reading.ledger.outstanding)),
                ("generators", f"{serving}/{self._generators}"),
            ]
            if (result := reading.evaluation) is not None:
                value = result.reward_mean if result.accuracy is None else result.accuracy
                cells.append(("eval", f"{'-' if value is None else format(value, '.3f')} at {result.version}"))
        return cells

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        cells = self._cells()
        for name, _ in cells:
            table.add_column(name, justify="right")
        table.add_row(*(value for _, value in cells))
        return table


def _number(record: Mapping[str, Any], name: str, form: str) -> str:
    value = record.get(name)
    return format(value, form) if isinstance(value, (int, float)) else "-"
