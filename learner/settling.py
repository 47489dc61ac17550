"""When trained groups leave Redis (`learner.settle_on`), and which of them a checkpoint must name.

- `checkpoint`: when one that contains their effect is durable. A learner that dies before gets them again, since their
  effect died with it: each group is in the surviving weights exactly once. The checkpoint carries the ids of those that
  were trained and not settled when it was made, so that a crash between writing it and settling them trains none twice.
- `step`: right after the optimizer step. A learner that dies loses what it trained since its last checkpoint: each
  group is in the surviving weights at most once.

Promise: whatever the broker's server loses of its last `DURABLE_S` (a power cut under `appendfsync everysec` takes a
second), a group that is in a checkpoint's weights is either gone from the broker for good or named by the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from broker import Broker
from common.config import Config
from learner.collector import Batch

DURABLE_S = 10.0


class Settling:
    """The groups that the current incarnation of the learner has trained.

    Args:
        broker, epoch: this incarnation.
        config: the run.
        contained: what the restored checkpoint carried, settled just now by `Broker.begin`.

    Attributes:
        durable: whether a checkpoint holds everything that was trained.
    """

    def __init__(self, broker: Broker, epoch: int, config: Config, contained: Iterable[str] = ()) -> None:
        self._broker, self._epoch = broker, epoch
        self._at_once = config.learner.settle_on == "step"
        self._settled_at: dict[str, float | None] = dict.fromkeys(contained, time.monotonic())
        self.durable = True

    @property
    def ids(self) -> tuple[str, ...]:
        """Groups in the weights that Redis still has, or could have again; the next checkpoint names them."""
        return tuple(self._settled_at)

    def trained(self, version: int, batch: Batch) -> None:
        """The optimizer steps that made `version` trained the batch. FencedError: a newer learner took over."""
        fresh = dict.fromkeys(delivery.group.group_id for delivery in batch.deliveries)
        settle = (*self._settled_at, *fresh) if self._at_once else ()
        settled = self._broker.step(self._epoch, version, batch.deliveries, settle)
        self._settled_at.update(fresh)
        self.durable = False
        if self._at_once:
            self._forget(settled)

    def saved(self) -> None:
        """A checkpoint that names `ids` is durable. FencedError as `trained`."""
        self._forget(self._broker.settle(self._epoch, self.ids))
        self.durable = True

    def _forget(self, settled: int) -> None:
        """All were settled, so many of them just now: forget those that the broker cannot lose any more."""
        now, fresh = time.monotonic(), sum(at is None for at in self._settled_at.values())
        lost = settled > fresh
        for group_id, at in list(self._settled_at.items()):
            if at is None or lost:  # the server had forgotten an earlier settling, maybe more than one
                self._settled_at[group_id] = now
            elif now - at > DURABLE_S:
                del self._settled_at[group_id]
