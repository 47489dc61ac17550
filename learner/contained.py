"""Which groups are in the weights and may not be known to the broker as durable: what a checkpoint has to carry.

Promise: whatever the broker's server loses of its last `DURABLE_S` (a power cut under `appendfsync everysec` takes a
second), a group that is in a checkpoint's weights is either gone from the broker for good or named by the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from broker import Broker

DURABLE_S = 10.0


class Contained:
    """Ids of groups, in the order they were trained; `fresh` says how many were never settled."""

    def __init__(self, ids: Iterable[str]) -> None:
        """`ids`: what the restored checkpoint carried, settled just now by `Broker.begin`."""
        self._settled_at: dict[str, float | None] = dict.fromkeys(ids, time.monotonic())

    @property
    def fresh(self) -> int:
        return sum(at is None for at in self._settled_at.values())

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._settled_at)

    def add(self, ids: Iterable[str]) -> None:
        """These were trained."""
        self._settled_at.update(dict.fromkeys(ids))

    def settle(self, broker: Broker, epoch: int) -> None:
        """A durable checkpoint carries `ids`: settle them, and forget those that the broker cannot lose any more.

        Raises:
            FencedError: a newer learner took over.
        """
        now, fresh = time.monotonic(), self.fresh
        lost = broker.settle(epoch, self.ids) > fresh
        for group_id, at in list(self._settled_at.items()):
            if at is None or lost:  # the server had forgotten an earlier settling, maybe more than one
                self._settled_at[group_id] = now
            elif now - at > DURABLE_S:
                del self._settled_at[group_id]
