"""`Broker`: a run's whole interface to Redis, synchronous and thread-safe.

Its parts: prompts and leases (`broker.prompts`), groups and the learner's epochs (`broker.groups`), evaluation rounds
(`broker.evaluations`), members and messages (`broker.fleet`), and the readings below. Every write is one atomic script
that is safe to send twice.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from broker.evaluations import Evaluations
from broker.fleet import Fleet
from broker.groups import GroupQueue
from broker.keys import GENERATORS, LEARNER
from broker.link import Endpoint, endpoint, open_client
from broker.prompts import PromptQueue
from broker.records import DeadLetter, Ledger, Queues
from common.config import Config

_COUNTERS = tuple(field.name for field in fields(Ledger) if field.name != "outstanding")


class Broker(PromptQueue, GroupQueue, Evaluations, Fleet):
    """One run in Redis. From asyncio, call it through `asyncio.to_thread`.

    Every method may raise HeadraceError where the server stays unreachable for a minute.
    """

    @classmethod
    def connect(cls, config: Config, where: Endpoint | None = None) -> Broker:
        """Connect to the run's server: `where`, or what the configuration, the environment or the run's folder say.

        Raises:
            ConfigError: no server there, one older than 7.0, or a wrong password.
        """
        where = where or endpoint(config)
        return cls(open_client(where), config, where.url)

    def ledger(self) -> Ledger:
        """The ledger, of one instant."""
        k = self.keys
        keys = [k.prompts, k.groups, k.unsettled, k.ledger, k.arrived]
        prompts, groups, unsettled, flat = self._run("ledger", keys, [])
        counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
        return Ledger(
            **{name: counters.get(name, 0) for name in _COUNTERS}, outstanding=prompts + groups - unsettled
        )

    def queues(self) -> Queues:
        """What waits and what is held. Lengths are exact: waiting = XLEN - pending, since what is done is deleted."""

        def read() -> Any:
            with self._client.pipeline(transaction=True) as pipe:
                for stream, group in ((self.keys.prompts, GENERATORS), (self.keys.groups, LEARNER)):
                    pipe.xlen(stream)
                    pipe.xpending(stream, group)
                pipe.hlen(self.keys.unsettled)
                pipe.xlen(self.keys.dead)
                return pipe.execute()

        prompts, leased, groups, held, unsettled, dead = self._call(read)
        return Queues(
            prompts_waiting=prompts - leased["pending"],
            prompts_leased=leased["pending"],
            groups_waiting=groups - held["pending"],
            groups_held=held["pending"] - unsettled,
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
