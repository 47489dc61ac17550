"""Looks at the ledger all the time a chaos run goes on, and remembers how long the append-only file was when."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from pathlib import Path

from broker import Broker, Ledger
from common.errors import HeadraceError

PERIOD_S = 0.01
# What `appendfsync everysec` may lose at a power cut.
UNSYNCED_S = 1.0


def released_above_bound(before: Ledger, after: Ledger, bound: int) -> bool:
    """Whether a prompt was released between two readings of one learner epoch although there was no budget for it."""
    return after.released > before.released and after.outstanding > bound


class Watch(threading.Thread):
    """Invariants 1 and 4, sampled. `problems` says what was wrong, `samples` how often it looked."""

    def __init__(self, broker: Broker, redis_folder: Path) -> None:
        super().__init__(name="watch", daemon=True)
        self.problems: list[str] = []
        self.samples = self.most_outstanding = 0
        self._broker, self._folder = broker, redis_folder
        self._sizes: deque[tuple[float, Path, int]] = deque(maxlen=int(4 / PERIOD_S))
        self._ended = threading.Event()

    def run(self) -> None:
        last: tuple[bytes | None, Ledger] | None = None
        bound = self._broker.config.max_outstanding
        while not self._ended.wait(PERIOD_S):
            self._measure()
            try:
                epoch = self._epoch()
                ledger = self._broker.ledger()
                same = epoch == self._epoch()
            except HeadraceError as error:
                self.problems.append(f"watch: {error}")
                return
            self.samples += 1
            self.most_outstanding = max(self.most_outstanding, ledger.outstanding)
            if not ledger.balanced:
                self.problems.append(f"the ledger does not balance: {ledger}")
            if same and last is not None and last[0] == epoch and released_above_bound(last[1], ledger, bound):
                self.problems.append(f"released beyond the budget of {bound}: {last[1]} -> {ledger}")
            last = (epoch, ledger) if same else None

    def end(self) -> None:
        self._ended.set()
        self.join()

    def unsynced_cut(self, rng: random.Random) -> tuple[Path, int, int] | None:
        """Where a power cut now might end the append-only file: file, its size, what is left of it."""
        self._measure()
        _, path, size = self._sizes[-1]
        oldest = time.monotonic() - UNSYNCED_S
        known = [was for at, file, was in self._sizes if file == path and at >= oldest]
        return (path, size, rng.randint(min(known), size)) if known else None

    def _epoch(self) -> bytes | None:
        client, key = self._broker._client, self._broker.keys.state
        value: bytes | None = self._broker._call(lambda: client.hget(key, "epoch"))
        return value

    def _measure(self) -> None:
        files = sorted((self._folder / "appendonlydir").glob("*.incr.aof"))
        if files:
            self._sizes.append((time.monotonic(), files[-1], files[-1].stat().st_size))
