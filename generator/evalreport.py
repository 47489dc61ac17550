"""What `headrace eval` shows: progress on standard error, the metrics as a table on standard output."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from common.evaluation import Estimate
from generator.evaluate import EvalResult

LINE_EVERY_S = 30.0


class Bar:
    """Problems done, on standard error: a bar on a terminal, else a line at most every 30 s and one at the end."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(TextColumn("problems"), *columns, console=self._console, transient=True)
        self._task = self._progress.add_task("problems", total=total)
        self._started = self._told = time.monotonic()

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def advance(self) -> None:
        """One problem is done."""
        self._done += 1
        self._progress.advance(self._task)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._told >= LINE_EVERY_S or self._done == self._total):
            self._console.print(f"{self._done} of {self._total} problems after {now - self._started:.0f} s")
            self._told = now


def show(result: EvalResult, console: Console) -> None:
    """The metrics as a table, and below it what should make one doubt them."""
    table = Table()
    for heading, justify in (("metric", "left"), ("value", "right"), ("95 % interval", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, estimate in result.metrics.items():
        table.add_row(name.replace("_", " "), *_cells(name, estimate))
    if result.no_majority is not None:
        table.add_row(f"majority@{result.samples}", "-", result.no_majority)
    console.print(f"{result.model} on {result.source}", markup=False, soft_wrap=True)
    console.print(table)
    if result.failures:
        total = sum(problem.samples for problem in result.problems)
        console.print(
            f"{result.failures} of {total} samples could not be judged and count as wrong; first: "
            f"{result.first_failure}",
            markup=False,
            soft_wrap=True,
        )


def _cells(name: str, estimate: Estimate) -> tuple[str, str]:
    digits = 1 if name == "response_tokens" else 3
    return f"{estimate.value:.{digits}f}", f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"
