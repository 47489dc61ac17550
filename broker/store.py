"""`Broker`: a run's whole interface to Redis, synchronous and thread-safe.

Its parts: prompts and leases (`broker.prompts`), groups and the learner's epochs (`broker.groups`), both traced where
that is asked for (`broker.tracing`), dead letters (`broker.deadletters`), evaluation rounds (`broker.evaluations`),
members and messages (`broker.fleet`), what the nodes of an elastic learner must know (`broker.elastic`), and the
readings below. Every write is one atomic script or command that is safe to send twice.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields
from typing import Any

from broker.clients import Endpoint, endpoint, open_client
from broker.deadletters import DeadLetters
from broker.elastic import Elastic
from broker.evaluations import Evaluations
from broker.fleet import Fleet
from broker.keys import GENERATORS, LEARNER
from broker.records import Lease, Ledger, Queues, Unfinished, Whereabouts
from broker.tracing import Traced
from common import wire
from common.config import Config
from common.errors import WireError
from common.trajectory import Group, PartialGroup, Prompt

_COUNTERS = tuple(field.name for field in fields(Ledger) if field.name != "outstanding")


class Broker(Traced, DeadLetters, Evaluations, Fleet, Elastic):
    """One run in Redis. From asyncio, call it through `asyncio.to_thread`.

    Every method may raise HeadraceError where the server stays unreachable for `broker.reconnect_s`.
    """

    @classmethod
    def connect(cls, config: Config, where: Endpoint | None = None, reader: bool = False) -> Broker:
        """Connect to the run's server: `where`, or what the configuration, the environment or the run's folder say.

        Args:
            reader: this one only looks, and may do no more; it finds nothing where no other part has ever connected.

        Raises:
            ConfigError: no server there, one older than 7.0, or a wrong password.
        """
        where = where or endpoint(config)
        broker = cls(open_client(where, config.broker), config, where.url)
        if not reader:
            broker.open()
        return broker

    def submit(self, consumer: str, lease: Lease, group: Group) -> bool:
        """As `PromptQueue.submit`, within `broker.max_bytes`: the size is sampled first, so a few groups may pass it.

        Raises:
            BrokerFullError: the groups, or the server, take no more now; the lease is still held.
        """
        self._check_room(unfinished_share=0.5)
        return super().submit(consumer, lease, group)

    def keep_partial(self, consumer: str, entry_id: str, partial: PartialGroup) -> bool:
        """As `PromptQueue.keep_partial`, within `broker.max_bytes`."""
        self._check_room(unfinished_share=math.inf)
        return super().keep_partial(consumer, entry_id, partial)

    def _check_room(self, unfinished_share: float) -> None:
        """Raises BrokerFullError where groups and what is kept of unfinished ones take more than `broker.max_bytes`.

        Of the latter at most `unfinished_share` of the limit is counted: they go only when groups are submitted, so
        they may slow submissions down, and never stop them.
        """
        limit = self.config.broker.max_bytes
        if limit is None:
            return
        groups, partial = self.group_bytes(), self._bytes(self.keys.partial)
        size = groups + min(partial, unfinished_share * limit)
        if size > limit:
            raise self._full(f"its groups take {size:.0f} bytes, more than broker.max_bytes ({limit})")

    def ledger(self) -> Ledger:
        """The ledger, of one instant."""
        k = self.keys
        keys = [k.prompts, k.groups, k.unsettled, k.ledger, k.outstanding]
        outstanding, flat = self._run("ledger", keys, [])
        counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
        return Ledger(**{name: counters.get(name, 0) for name in _COUNTERS}, outstanding=outstanding)

    def queues(self) -> Queues:
        """What waits and what is held. Lengths are exact: waiting = XLEN - pending, since what is done is deleted."""
        k = self.keys
        keys = [k.prompts, k.groups, k.unsettled, k.dead, k.state]
        prompts, leased, groups, held, unsettled, dead = self._run("queues", keys, [GENERATORS, LEARNER])
        return Queues(
            prompts_waiting=prompts - leased,
            prompts_leased=leased,
            groups_waiting=groups - held,
            groups_held=held - unsettled,
            unsettled=unsettled,
            dead_letters=dead,
        )

    def group_bytes(self) -> int:
        """Bytes of all groups in the stream, as the server samples them."""
        return self._bytes(self.keys.groups)

    def _bytes(self, key: str) -> int:
        return int(self._call(lambda: self._client.memory_usage(key)) or 0)

    def newest_groups(self, count: int) -> list[tuple[str, Prompt, Group]]:
        """Up to `count` of the groups in the stream, newest first: entry id, prompt and group of each. What cannot be
        decoded, or holds another number of responses, is left out."""
        entries = self._call(lambda: self._client.xrevrange(self.keys.groups, count=count))
        found = []
        for entry_id, values in entries:
            with suppress(WireError):
                group = wire.decode_group(values.get(b"p", b""), self.config.sampling.group_size)
                found.append((entry_id.decode(), wire.decode_prompt(values.get(b"q", b"")), group))
        return found

    def server_memory(self) -> tuple[int, int]:
        """Bytes the server uses, and its limit (0: none)."""
        memory = self._call(lambda: self._client.info("memory"))
        return int(memory["used_memory"]), int(memory["maxmemory"])

    def unfinished(self) -> Unfinished:
        """The oldest groups that have not ended, and how often those that have not ended expired; of one instant."""
        k = self.keys
        keys = [k.prompts, k.groups, k.outstanding, k.unsettled, k.arrived, k.expiries, k.state]
        outstanding, unsettled, flat = self._run("oldest", keys, [GENERATORS, LEARNER])
        expiries = {name.decode(): int(count) for name, count in zip(flat[::2], flat[1::2], strict=True)}
        return Unfinished(_whereabouts(outstanding), _whereabouts(unsettled, trained=True), expiries)


def _whereabouts(reply: list[Any], trained: bool = False) -> Whereabouts | None:
    if not reply:
        return None
    group_id, stream, holder = (value.decode(errors="replace") for value in reply[:3])
    if trained:
        place = "trained, and in no durable checkpoint yet"
    elif stream == "prompts":
        place = f"leased by {holder}" if holder else "queued prompt"
    elif stream == "groups":
        place = f"taken by the learner ({holder})" if holder else "group in the stream"
    else:
        place = "LOST: neither among the prompts nor among the groups"
    return Whereabouts(group_id, place, max(0, int(reply[3])) / 1000)
