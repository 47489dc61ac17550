"""A node's place in torch's rendezvous: `DynamicRendezvousHandler`, and what else a node of ours must do with it.

The state in the store is pickled by torch, so the store's port is for the nodes of the learner alone.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

# A node whose heartbeats (every second) stop for this many seconds is taken for dead; with 2 a busy machine split the
# learner in two.
_DEAD_AFTER = 5
# How long a round waits for more nodes once there are enough; nodes look once a second.
_LAST_CALL = timedelta(seconds=2)
_JOIN = timedelta(seconds=30)
_WITHDRAW_S = 5.0


class Meeting(DynamicRendezvousHandler):
    """This node among the others that meet in a store."""

    @classmethod
    def at(cls, store: TCPStore, name: str, address: str, min_nodes: int, max_nodes: int) -> Meeting:
        """In the store called `name`; the others reach this node at `address`.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """
        timeout = RendezvousTimeout(join=_JOIN, last_call=_LAST_CALL)
        handler = cls.from_backend(
            name,
            store,
            C10dRendezvousBackend(store, name),
            min_nodes,
            max_nodes,
            address,
            timeout,
            keep_alive_interval=1,
            keep_alive_max_attempt=_DEAD_AFTER,
        )
        assert isinstance(handler, cls)
        return handler

    @property
    def nodes(self) -> int:
        """How many nodes of this round live, as of the last look at the store."""
        return len(self._state_holder.state.participants)

    def withdraw(self) -> None:
        """Leave the round for good: the others need not wait until this node is taken for dead."""
        self._stop_heartbeats()
        with suppress(RendezvousError):
            self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _WITHDRAW_S)

    def forget(self) -> None:
        """The store is gone."""
        self._stop_heartbeats()
