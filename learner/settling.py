"""When trained groups leave Redis (`learner.settle_on`), and which of them a checkpoint must name.

- `checkpoint`: when one that contains their effect is durable. A learner that dies before gets them again, since their
  effect died with it: each group is in the surviving weights exactly once. The checkpoint carries the ids of those that
  were trained and not settled when it was made, so that a crash between writing it and settling them trains none twice.
- `step`: right after the optimizer step. A learner that dies loses what it trained since its last checkpoint: each
  group is in the surviving weights at most once. A checkpoint has nothing to name: whatever it contains is settled.
"""

from __future__ import annotations

from broker import Broker
from common.config import Config
from learner.collector import Batch


class Settling:
    """The groups that the current incarnation of the learner has trained."""

    def __init__(self, broker: Broker, epoch: int, config: Config) -> None:
        self._broker, self._epoch = broker, epoch
        self._at_once = config.learner.settle_on == "step"
        self._unsettled: list[str] = []
        self.durable = True  # whether a checkpoint holds everything that was trained

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Trained groups that Redis still has; the next checkpoint contains them all and names them."""
        return tuple(self._unsettled)

    def trained(self, version: int, batch: Batch) -> None:
        """The optimizer steps that made `version` trained the batch. FencedError: a newer learner took over."""
        ids = [delivery.group.group_id for delivery in batch.deliveries]
        self._broker.step(self._epoch, version, batch.deliveries)
        self.durable = False
        if self._at_once:
            self._broker.settle(self._epoch, ids)
        else:
            self._unsettled += ids

    def saved(self) -> None:
        """A checkpoint that names `unsettled` is durable. FencedError as `trained`."""
        self._broker.settle(self._epoch, self._unsettled)
        self._unsettled.clear()
        self.durable = True
