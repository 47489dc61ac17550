"""The group side: the learner takes groups, trains them, and settles them when their effect is durable.

Promise: a group reaches the surviving weights exactly once. Each incarnation of the learner has an epoch; `begin` makes
a new one, fences the older ones and delivers again whatever the restored weights do not contain.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from broker.keys import LEARNER
from broker.link import MAX_BLOCK_MS, Link, _log, script_text
from broker.records import Delivery
from common import wire
from common.errors import WireError

# How an entry of the stream came there. Only what came through a lease is trained.
_LEASED, _DUPLICATE, _FOREIGN = range(3)


class GroupQueue(Link):
    """Methods of `Broker` around the `groups` stream. All but `version` and `finished` are for the learner's rank 0,
    and `take` for one thread of it."""

    _newest_taken = (0, "0")  # epoch, entry id

    def begin(self, version: int, contained: Collection[str]) -> int:
        """Begin a new incarnation of the learner, whose weights are `version` and contain the groups `contained`.

        Groups in `contained` are settled. All others in the stream, trained by an older incarnation or not, are
        outstanding and will be delivered again. The run counts as unfinished again.

        Returns:
            The epoch, which fences every older one.
        """
        k = self.keys
        keys = [k.groups, k.ledger, k.state, k.arrived, k.unsettled, k.events]
        return int(self._run("begin", keys, [LEARNER, version, *contained]))

    def take(self, epoch: int, count: int, block_ms: int) -> list[Delivery]:
        """Up to `count` groups, after at most `block_ms` (and 5 s). Empty if there are none, or none that is a group:
        an entry that cannot be decoded, or that no lease produced, is dead-lettered with the reason and skipped.

        Raises:
            FencedError: a newer incarnation began.
        """
        entries = self._take(epoch, count)
        if not entries and block_ms > 0:
            # Waits outside the consumer group: a wait there would end in a read that the epoch does not guard.
            block, last = min(block_ms, MAX_BLOCK_MS), self._last_delivered()
            if self._call(lambda: self._client.xread({self.keys.groups: last}, count=1, block=block)):
                entries = self._take(epoch, count)
        deliveries = []
        for entry_id, group_id, payload, origin in entries:
            try:
                deliveries.append(self._delivery(entry_id, group_id, payload, origin))
            except WireError as error:
                _log.warning("group entry %s dead-lettered: %s", entry_id, error)
                self._drop(epoch, "dead", str(error), [(entry_id, group_id)])
        return deliveries

    def expire(self, epoch: int, deliveries: Sequence[Delivery]) -> None:
        """These are too old to train: they go, and their budget is free. FencedError as `take`."""
        self._drop(epoch, "expired", "", [(each.entry_id, each.group.group_id) for each in deliveries])

    def step(self, epoch: int, version: int, deliveries: Sequence[Delivery]) -> None:
        """The optimizer steps that made `version` trained these. FencedError as `take`."""
        k = self.keys
        pairs = [value for each in deliveries for value in (each.entry_id, each.group.group_id)]
        self._run("step", [k.ledger, k.state, k.arrived, k.unsettled, k.events], [epoch, version, *pairs])

    def settle(self, epoch: int, group_ids: Collection[str]) -> int:
        """The effect of these trained groups is durable: acknowledge and delete them. FencedError as `take`.

        Returns:
            How many were settled now; groups that were never trained, or are settled already, do not count.
        """
        if not group_ids:
            return 0
        k = self.keys
        keys = [k.groups, k.ledger, k.state, k.arrived, k.unsettled]
        return int(self._run("settle", keys, [LEARNER, epoch, *group_ids]))

    def version(self) -> int:
        """The learner's policy version."""
        return int(self._call(lambda: self._client.hget(self.keys.state, "version")) or 0)

    def finish(self) -> None:
        """The run has reached its last step."""

        def write() -> None:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(self.keys.state, "finished", 1)
                pipe.xadd(self.keys.events, {"e": "finish"}, maxlen=100, approximate=False)
                pipe.execute()

        self._call(write)

    def finished(self) -> bool:
        """Whether the run has reached its last step, and no learner has begun since."""
        return self._call(lambda: self._client.hget(self.keys.state, "finished")) is not None

    def _delivery(self, entry_id: str, group_id: str, payload: bytes, origin: int) -> Delivery:
        """Raises WireError, naming the entry, where it is not a group of `group_size` that came through a lease."""
        try:
            if origin != _LEASED:
                other = f"group {group_id} is there under another entry" if origin == _DUPLICATE else "foreign"
                raise WireError(f"no lease of this run produced it ({other})")
            group = wire.decode_group(payload, self.config.sampling.group_size)
            if group.group_id != group_id:
                raise WireError(f"group {group.group_id} came under the id {group_id}")
        except WireError as error:
            raise WireError(f"entry {entry_id}: {error}") from None
        return Delivery(entry_id, group)

    def _take(self, epoch: int, count: int) -> list[tuple[str, str, bytes, int]]:
        """Entry id, group id, payload and origin of up to `count` entries, which this epoch holds from now on.

        A call that is repeated, since its reply was lost, asks for what this epoch holds beyond the newest entry that
        arrived here, so that nothing stays behind.
        """
        k, consumer = self.keys, f"epoch-{epoch}"
        arrived_epoch, newest = self._newest_taken
        after = itertools.chain([">"], itertools.repeat(newest if arrived_epoch == epoch else "0"))

        def read() -> Any:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.xreadgroup(LEARNER, consumer, {k.groups: next(after)}, count=count)
                pipe.eval(script_text("take"), 2, k.groups, k.state, LEARNER, epoch)
                results = pipe.execute(raise_on_error=False)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            return results[0][0][1] if results[0] else []

        # An entry that was deleted while it was held has no fields.
        entries = [(entry_id.decode(), fields or {}) for entry_id, fields in self._call(read)]
        if not entries:
            return []
        self._newest_taken = (epoch, entries[-1][0])
        ids = [fields.get(b"g", b"") for _, fields in entries]
        arrived = self._call(lambda: self._client.hmget(k.arrived, ids))
        return [
            (entry_id, group_id.decode(errors="replace"), fields.get(b"p", b""), _origin(entry_id, came))
            for (entry_id, fields), group_id, came in zip(entries, ids, arrived, strict=True)
        ]

    def _last_delivered(self) -> str:
        groups = self._call(lambda: self._client.xinfo_groups(self.keys.groups))
        return next((each["last-delivered-id"].decode() for each in groups if each["name"] == LEARNER.encode()), "$")

    def _drop(self, epoch: int, counter: str, error: str, entries: Sequence[tuple[str, str]]) -> None:
        if entries:
            k = self.keys
            keys = [k.groups, k.dead, k.ledger, k.state, k.arrived, k.unsettled, k.events]
            self._run("drop", keys, [LEARNER, epoch, counter, error, *(value for pair in entries for value in pair)])


def _origin(entry_id: str, arrived: bytes | None) -> int:
    """`arrived`: the entry under which the group of this one came through a lease."""
    if arrived is None:
        return _FOREIGN
    return _LEASED if arrived.decode() == entry_id else _DUPLICATE
