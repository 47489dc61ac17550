"""Experiment trackers that cannot harm the run: each works in a thread of its own, behind a bounded queue.

Promises: `write` never waits and never raises; a tracker that fails is off from then on, with one warning that holds no
credentials; one that is too slow loses records, which are counted and said; `close` waits `CLOSE_S` at most, for all
trackers together. A run that is resumed writes no step a second time to a tracker that would show it twice.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.log import Logger
from common.metrics import MetricSink
from common.trackers import KINDS, Target

QUEUE_RECORDS = 256
CLOSE_S = 10.0

_SECRET_NAME = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


class Trackers:
    """The configured trackers as one sink."""

    def __init__(self, target: Target, log: Logger) -> None:
        self._each = []
        for name in target.config.tracking.trackers:
            kind = KINDS[name]
            mark = target.folder / f"{name}-{target.part}.step" if kind.appends else None
            self._each.append(Background(name, lambda open=kind.open: open(target), log, mark))  # type: ignore[misc]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for each in self._each:
            each.write(step, values)

    def close(self) -> None:
        for each in self._each:
            each.finish()
        deadline = time.monotonic() + CLOSE_S
        for each in self._each:
            each.join(deadline - time.monotonic())


class Background:
    """One tracker in its thread.

    Args:
        name: for the log.
        open: makes the tracker, in the thread.
        log: takes what goes wrong.
        mark: file that keeps the last step written, below which nothing is written again. None: everything is.
        size: records that may wait.
    """

    def __init__(
        self, name: str, open: Callable[[], MetricSink], log: Logger, mark: Path | None, size: int = QUEUE_RECORDS
    ) -> None:
        self.dropped = 0
        self._name, self._open, self._log, self._mark = name, open, log, mark
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(size)
        self._off = self._finishing = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._off:
            return
        try:
            self._waiting.put_nowait((step, dict(values)))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._log.warning("tracker %s is too slow: records are dropped, step %d first", self._name, step)

    def finish(self) -> None:
        """Nothing more will come."""
        self._finishing = True
        with contextlib.suppress(queue.Full):  # of what waits the thread sees the end
            self._waiting.put_nowait((0, {}))

    def join(self, timeout_s: float) -> None:
        """Wait until everything is written, `timeout_s` at most; what is left then is given up."""
        self._thread.join(max(timeout_s, 0.0))
        if self._thread.is_alive() and not self._off:
            self._log.warning("tracker %s did not end in time; its last records may be missing", self._name)
        if self.dropped:
            self._log.warning("tracker %s lost %d records, which were dropped", self._name, self.dropped)
        self._off = True

    def _run(self) -> None:
        try:
            last, sink = self._last(), self._open()
            while not (self._finishing and self._waiting.empty()):
                step, values = self._waiting.get()
                if values and step > last:
                    sink.write(step, values)
                    self._remember(step)
            sink.close()
        except (Exception, SystemExit) as error:  # a package that gives up like a program
            if self._off:  # given up before it gave up
                return
            self._off = True
            reason = without_secrets(f"{type(error).__name__}: {error}", os.environ)
            self._log.warning("tracker %s is off from now on: %s", self._name, " ".join(reason.split())[:500])

    def _last(self) -> int:
        try:
            return int(self._mark.read_text()) if self._mark is not None else -1
        except (FileNotFoundError, ValueError):  # a crash may leave it empty
            return -1

    def _remember(self, step: int) -> None:
        if self._mark is not None:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(f"{step}\n")


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """`text` without the user part of URLs and without what the secrets in `environ` are."""
    secrets = [value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= 4]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _USER_IN_URL.sub("***@", text)
