"""Fills batches from the group stream, reading ahead in a thread so that a step never waits for decoding.

Promise: a batch holds `groups_per_step` groups, or fewer that hold `tokens_per_step` tokens, none of them too old to
train at the version it is taken for; what is too old expires, which sends its prompt to be sampled again, and what is
left over waits for the next batch. Which groups a batch takes is decided by `learner.pending`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass

from broker import Broker, Delivery
from common.config import Config
from learner.batch import expired
from learner.pending import Pending

_TAKE_BLOCK_MS = 500
# How soon `next` looks again at `stopping`, and at what is outstanding.
_LOOK_S = 0.1


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
        self._pending = Pending(config)
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
        self._broker.expire(self._epoch, self._pending.take_expired(version))
        while True:
            self._accept_ready(version)
            batch = self._choose(version)
            remaining = timeout_s - (time.monotonic() - started)
            if batch is not None or remaining <= 0 or stopping.is_set():
                break
            with contextlib.suppress(queue.Empty):
                self._accept(self._ready.get(timeout=min(remaining, _LOOK_S)), version)
        self._waited_s += time.monotonic() - started
        if batch is None:
            return None
        taken = Batch(batch, self._waited_s)
        self._waited_s = 0.0
        return taken

    def _choose(self, version: int) -> tuple[Delivery, ...] | None:
        if not self._pending.full:
            return None
        bounds = self._pending.bounds(version)
        return self._pending.choose(version, self._broker.outstanding_until(bounds) if bounds else ())

    def _accept_ready(self, version: int) -> None:
        """Take over what was read ahead: until a batch is full, or all of it where the choice looks at all of it."""
        with contextlib.suppress(queue.Empty):
            while self._pending.bounds(version) or not self._pending.full:
                self._accept(self._ready.get_nowait(), version)

    def _accept(self, item: Delivery | Exception, version: int) -> None:
        if isinstance(item, Exception):
            raise item
        if expired(item.group, self._config, version):
            self._broker.expire(self._epoch, [item])
        else:
            self._pending.add(item)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
