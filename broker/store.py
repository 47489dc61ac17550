"""`Broker`: a run's whole interface to Redis, synchronous and thread-safe.

Its parts: prompts and leases (`broker.prompts`), groups and the learner's epochs (`broker.groups`), evaluation rounds
(`broker.evaluations`), members and messages (`broker.fleet`), and the readings below. Every write is one atomic script
that is safe to send twice.
"""

from __future__ import annotations

from dataclasses import fields

from broker.clients import Endpoint, endpoint, open_client
from broker.evaluations import Evaluations
from broker.fleet import Fleet
from broker.groups import GroupQueue
from broker.keys import GENERATORS, LEARNER
from broker.prompts import PromptQueue
from broker.records import DeadLetter, Ledger, Queues
from common.config import Config
from common.trajectory import Group

_COUNTERS = tuple(field.name for field in fields(Ledger) if field.name != "outstanding")


class Broker(PromptQueue, GroupQueue, Evaluations, Fleet):
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

    def submit(self, consumer: str, entry_id: str, group: Group) -> bool:
        """As `PromptQueue.submit`, within `broker.max_bytes`: the size is sampled first, so a few groups may pass it.

        Raises:
            BrokerFullError: the groups, or the server, take no more now; the lease is still held.
        """
        limit = self.config.broker.max_bytes
        if limit is not None:
            size = self._call(lambda: self._client.memory_usage(self.keys.groups)) or 0
            if size > limit:
                raise self._full(f"its groups take {size} bytes, more than broker.max_bytes ({limit})")
        return super().submit(consumer, entry_id, group)

    def ledger(self) -> Ledger:
        """The ledger, of one instant."""
        k = self.keys
        prompts, groups, unsettled, flat = self._run("ledger", [k.prompts, k.groups, k.unsettled, k.ledger], [])
        counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
        return Ledger(
            **{name: counters.get(name, 0) for name in _COUNTERS}, outstanding=prompts + groups - unsettled
        )

    def queues(self) -> Queues:
        """What waits and what is held. Lengths are exact: waiting = XLEN - pending, since what is done is deleted."""
        k = self.keys
        keys = [k.prompts, k.groups, k.unsettled, k.dead]
        prompts, leased, groups, held, unsettled, dead = self._run("queues", keys, [GENERATORS, LEARNER])
        return Queues(
            prompts_waiting=prompts - leased,
            prompts_leased=leased,
            groups_waiting=groups - held,
            groups_held=held - unsettled,
            unsettled=unsettled,
            dead_letters=dead,
        )

    def dead_letters(self, limit: int = 10) -> list[DeadLetter]:
        """The newest dead letters, newest first."""
        entries = self._call(lambda: self._client.xrevrange(self.keys.dead, count=limit))
        return [
            DeadLetter(*(values.get(name, b"").decode(errors="replace") for name in (b"g", b"error")))
            for _, values in entries
        ]
