"""`Broker`: a run's whole interface to Redis, synchronous and thread-safe.

Its parts: prompts and leases (`broker.prompts`), groups and the learner's epochs (`broker.groups`), dead letters
(`broker.deadletters`), evaluation rounds (`broker.evaluations`), members and messages (`broker.fleet`), and the
readings below. Every write is one atomic script that is safe to send twice.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from broker.deadletters import DeadLetters
from broker.evaluations import Evaluations
from broker.fleet import Fleet
from broker.groups import GroupQueue
from broker.keys import GENERATORS, LEARNER
from broker.link import Endpoint, endpoint, open_client
from broker.prompts import PromptQueue
from broker.records import Ledger, Queues, Unfinished, Whereabouts
from common.config import Config

_COUNTERS = tuple(field.name for field in fields(Ledger) if field.name != "outstanding")


class Broker(PromptQueue, GroupQueue, DeadLetters, Evaluations, Fleet):
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
        prompts, groups, unsettled, flat = self._run("ledger", [k.prompts, k.groups, k.unsettled, k.ledger], [])
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
                pipe.zcard(self.keys.unsettled)
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

    def unfinished(self) -> Unfinished:
        """The oldest groups that have not ended, and how often those that have not ended expired; of one instant."""
        k = self.keys
        keys = [k.prompts, k.groups, k.outstanding, k.unsettled, k.arrived, k.expiries]
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
