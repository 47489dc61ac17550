"""What `headrace up` shows while a run goes on: a live table on a terminal, else a line per step."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from broker.records import EvalResult, Ledger, Member, Queues
from broker.store import Broker
from common.errors import HeadraceError

REFRESH_S = 1.0


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, as its server tells it."""

    version: int
    ledger: Ledger
    queues: Queues
    generators: tuple[Member, ...]
    evaluation: EvalResult | None = None
    wished_ranks: int | None = None

    @property
    def waiting_groups(self) -> int:
        return self.queues.groups_waiting


class Observer:
    """Reads the run once a second in a thread of its own: an unreachable server must not stop the launcher."""

    def __init__(self, connect: Callable[[], Broker]) -> None:
        self.latest: Snapshot | None = None
        self._connect = connect
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * REFRESH_S)

    def _run(self) -> None:
        broker: Broker | None = None
        while not self._stop.wait(REFRESH_S):
            try:
                broker = broker or self._connect()
                generators = tuple(broker.members("generator"))
                result = broker.evaluation().result
                readings = broker.version(), broker.ledger(), broker.queues()
                self.latest = Snapshot(*readings, generators, result, broker.wished_ranks())
            except HeadraceError:  # shown as a display that stands still; the members say what is wrong
                continue
        if broker is not None:
            broker.close()


class MetricsTail:
    """New records of a growing `metrics.jsonl`; what was there before is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

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
        self._snapshot: Snapshot | None = None
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

    def update(self, snapshot: Snapshot | None, records: list[dict[str, Any]]) -> None:
        self._snapshot = snapshot
        for record in records:
            self._record = record
            if not self._console.is_terminal:
                self.say("  ".join(f"{name} {value}" for name, value in self._cells()))

    def _cells(self) -> list[tuple[str, str]]:
        """(what, value) in the order shown; a dash stands for what is not known yet."""
        record, snapshot = self._record, self._snapshot
        cells = [
            ("step", f"{_number(record, 'step', '.0f')}/{self._max_steps}"),
            ("version", _number(record, "version", ".0f")),
            ("reward", _number(record, "reward_mean", ".3f")),
            ("accuracy", _number(record, "sampled_accuracy", ".3f")),
            ("tokens/s", _number(record, "tokens_per_s", ".0f")),
            ("staleness", _number(record, "staleness_max", ".0f")),
        ]
        if snapshot is not None:
            serving = sum(member.state == "serving" for member in snapshot.generators)
            cells += [
                ("queue", str(snapshot.waiting_groups)),
                ("outstanding", str(snapshot.ledger.outstanding)),
                ("generators", f"{serving}/{self._generators}"),
            ]
            if (result := snapshot.evaluation) is not None:
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
