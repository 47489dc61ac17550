"""Fills batches from the group stream, reading ahead in a thread so that a step never waits for decoding.

Promise: a batch holds exactly `groups_per_step` groups, none of them too old to train at the version it is taken for;
what is too old is reported as expired, and what is left over waits for the next batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

from broker import Broker, Delivery
from common.config import Config
from learner.batch import expired

_TAKE_BLOCK_MS = 500


@dataclass(frozen=True)
class Batch:
    """Groups for one step, and how long the learner waited for them, in seconds."""

    deliveries: tuple[Delivery, ...]
    wait_s: float


class Collector:
    """Rank 0's end of the group stream."""

    def __init__(self, broker: Broker, epoch: int, config: Config) -> None:
        self._broker, self._epoch, self._config = broker, epoch, config
        self._ready: queue.Queue[Delivery | Exception] = queue.Queue(maxsize=2 * config.learner.groups_per_step)
        self._pending: deque[Delivery] = deque()
        self._waited_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="collector", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                for delivery in self._broker.take(self._epoch, self._config.learner.groups_per_step, _TAKE_BLOCK_MS):
                    self._put(delivery)
        except Exception as error:  # handed to the main thread, which raises it
            self._put(error)

    def _put(self, item: Delivery | Exception) -> None:
        while not self._stopping.is_set():
            try:
                self._ready.put(item, timeout=1.0)
                return
            except queue.Full:
                continue

    def next(self, version: int, timeout_s: float, stopping: threading.Event) -> Batch | None:
        """The next batch for a step at policy `version`, or None if it did not fill within `timeout_s`, or `stopping`.

        Raises:
            HeadraceError: the broker is gone for longer than its deadline, or this learner was fenced.
        """
        started = time.monotonic()
        self._drop_expired(version)
        wanted = self._config.learner.groups_per_step
        while len(self._pending) < wanted and not stopping.is_set():
            remaining = timeout_s - (time.monotonic() - started)
            if remaining <= 0:
                break
            try:
                item = self._ready.get(timeout=min(remaining, 0.5))  # looks at `stopping` in between
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            self._accept(item, version)
        self._waited_s += time.monotonic() - started
        if len(self._pending) < wanted:
            return None
        batch = Batch(tuple(self._pending.popleft() for _ in range(wanted)), self._waited_s)
        self._waited_s = 0.0
        return batch

    def _drop_expired(self, version: int) -> None:
        pending, self._pending = self._pending, deque()
        for delivery in pending:
            self._accept(delivery, version)

    def _accept(self, delivery: Delivery, version: int) -> None:
        if expired(delivery.group, self._config, version):
            self._broker.expire(self._epoch, [delivery])
        else:
            self._pending.append(delivery)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
