"""What the nodes of an elastic learner must know: where they meet, and how many they should be.

They meet in a store of torch's inside the broker service, which outlives any of them. Its state is lost with the
service; a new one says where it is, and the nodes come there.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from broker.addresses import own_address
from broker.link import Link
from common.config import Config
from common.errors import ConfigError
from common.log import Logger

_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Meeting:
    """A store: where it listens, and its name, which no other store has."""

    host: str
    port: int
    name: str


class Elastic(Link):
    """Methods of `Broker` around the nodes of an elastic learner."""

    def invite(self, meeting: Meeting) -> None:
        """The nodes of the learner are to meet there."""
        value = f"{meeting.name} {meeting.port} {meeting.host}"
        self._call(lambda: self._client.hset(self.keys.elastic, "store", value))

    def meeting(self) -> Meeting | None:
        """Where the nodes meet, as the last broker service said, which need not live any more; None: none ever did."""
        value = self._call(lambda: self._client.hget(self.keys.elastic, "store"))
        if value is None:
            return None
        name, port, host = value.decode().split(" ")
        return Meeting(host, int(port), name)

    def resize(self, ranks: int) -> None:
        """Wish for a learner of so many ranks."""
        self._call(lambda: self._client.hset(self.keys.elastic, "ranks", ranks))

    def wished_ranks(self) -> int | None:
        """How many ranks the learner is wished to have; None: nobody wished for anything."""
        value = self._call(lambda: self._client.hget(self.keys.elastic, "ranks"))
        return None if value is None else int(value)


def nodes_for(config: Config, ranks: int) -> int:
    """How many nodes make `ranks` ranks. ConfigError: no number of them does, or not within `learner.elastic`."""
    elastic, each = config.learner.elastic, config.learner.ranks
    if elastic is None:
        raise ConfigError("learner.elastic: not set, so that the number of ranks is fixed; set min_nodes and max_nodes")
    nodes, rest = divmod(ranks, each)
    if rest:
        raise ConfigError(f"{ranks} ranks: a node has {each} (learner.ranks); use a multiple of it")
    if not elastic.min_nodes <= nodes <= elastic.max_nodes:
        low, high = elastic.min_nodes * each, elastic.max_nodes * each
        raise ConfigError(
            f"{ranks} ranks: {nodes} nodes, outside learner.elastic.min_nodes ({elastic.min_nodes}) and max_nodes "
            f"({elastic.max_nodes}); use {low} to {high}"
        )
    return nodes


@contextmanager
def hosting(broker: Elastic, config: Config, log: Logger) -> Iterator[None]:
    """While inside, this process hosts the store of an elastic learner; nothing for any other learner.

    Raises:
        ConfigError: `learner.elastic.store_port` is taken.
    """
    elastic = config.learner.elastic
    if elastic is None:
        yield
        return
    from torch.distributed import TCPStore

    own = own_address(broker.url)
    # Under a name of its own it is reached from elsewhere: on all interfaces.
    bound = _listen("" if elastic.store_host else own, elastic.store_port or 0)
    port = int(bound.getsockname()[1])
    store = TCPStore(
        own, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=bound.detach()
    )
    meeting = Meeting(elastic.store_host or own, port, uuid.uuid4().hex[:12])
    broker.invite(meeting)
    log.info("the learner's nodes meet at %s:%d", meeting.host, meeting.port)
    try:
        yield
    finally:
        del store  # ends its server


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"learner.elastic.store_port: cannot listen on {host}:{port} ({error}); use another one, or null for any"
        ) from None
