"""When trained groups leave Redis (`learner.settle_on`), and which of them a checkpoint must name.

- `snapshot`: when a snapshot or a checkpoint that contains their effect is durable. A learner that dies before gets
  them again, since their effect died with it: each group is in the surviving weights exactly once. Both carry the ids
  of those that were trained and not settled when they were made, so that a crash between the rename that makes one
  durable and the settling trains none twice.
- `checkpoint`: the same, but a snapshot does not settle.
- `step`: right after the optimizer step. A learner that dies loses what it trained since its last save: each group is
  in the surviving weights at most once.

Saves end later than they begin: what is trained meanwhile is in none of them yet. `saved` therefore settles the ids
that the save itself names.

Promise: whatever the broker's server loses of its last `DURABLE_S` (a power cut under `appendfsync everysec` takes a
second), a group that is in a checkpoint's weights is either gone from the broker for good or named by the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from broker import Broker
from common.config import Config
from learner.collector import Batch
from learner.saving import Kind

DURABLE_S = 10.0


class Settling:
    """The groups that the current incarnation of the learner has trained.

    Args:
        broker, epoch: this incarnation.
        config: the run.
        contained: what the restored checkpoint carried, settled just now by `Broker.begin`.

    Attributes:
        all_settled: whether everything that was trained has left Redis.
    """

    def __init__(self, broker: Broker, epoch: int, config: Config, contained: Iterable[str] = ()) -> None:
        self._broker, self._epoch = broker, epoch
        self._settle_on = config.learner.settle_on
        self._settled_at: dict[str, float | None] = dict.fromkeys(contained, time.monotonic())

    @property
    def ids(self) -> tuple[str, ...]:
        """Groups in the weights that Redis still has, or could have again; what is saved now names them."""
        return tuple(self._settled_at)

    @property
    def all_settled(self) -> bool:
        return None not in self._settled_at.values()

    def trained(self, version: int, batch: Batch) -> None:
        """The optimizer steps that made `version` trained the batch. FencedError: a newer learner took over."""
        fresh = dict.fromkeys(delivery.group.group_id for delivery in batch.deliveries)
        settle = (*self._settled_at, *fresh) if self._settle_on == "step" else ()
        settled = self._broker.step(self._epoch, version, batch.deliveries, settle)
        self._settled_at.update(fresh)
        if settle:
            self._forget(settle, settled)

    def saved(self, kind: Kind, named: Sequence[str]) -> None:
        """A snapshot or checkpoint that names these groups is durable. FencedError as `trained`."""
        if kind == "checkpoint" or self._settle_on != "checkpoint":
            self._forget(named, self._broker.settle(self._epoch, named))

    def _forget(self, named: Sequence[str], settled: int) -> None:
        """These were settled, so many of them just now: forget those that the broker cannot lose any more."""
        now, known = time.monotonic(), [group_id for group_id in named if group_id in self._settled_at]
        lost = settled > sum(self._settled_at[group_id] is None for group_id in known)
        for group_id in known:
            at = self._settled_at[group_id]
            if at is None or lost:  # the server had forgotten an earlier settling, maybe more than one
                self._settled_at[group_id] = now
            elif now - at > DURABLE_S:
                del self._settled_at[group_id]
