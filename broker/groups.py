"""The group side: the learner takes groups, trains them, and settles them when their effect is durable.

Promise: a group reaches the surviving weights exactly once. Each incarnation of the learner has an epoch; `begin` makes
a new one, fences the older ones and delivers again whatever the restored weights do not contain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import redis

from broker.keys import LEARNER, learner_group
from broker.link import MAX_BLOCK_MS, Link, _log, replies
from broker.records import Delivery
from common import wire
from common.errors import HeadraceError, WireError

# How an entry of the stream came there. Only what came through a lease is trained.
_LEASED, _DUPLICATE, _FOREIGN = range(3)

_Entry = tuple[str, str, bytes, int]  # entry id, group id, payload, origin


class GroupQueue(Link):
    """Methods of `Broker` around the `groups` stream. All but `version` and `finished` are for the learner's rank 0,
    and `take` for one thread of it."""

    _newest_taken = (0, "0")  # epoch, entry id
    _in_doubt = False  # whether entries were perhaps delivered that did not arrive here
    _recorded = (0, 0)  # epoch, and the version whose record the server acknowledged last

    def begin(self, version: int, contained: Collection[str]) -> int:
        """Begin a new incarnation of the learner, whose weights are `version` and contain the groups `contained`.

        Groups in `contained` are settled; one that the server has lost will not be trained when it comes again. All
        others in the stream, trained by an older incarnation or not, are outstanding and will be delivered again. The
        run counts as unfinished again.

        Returns:
            The epoch, which fences every older one.
        """
        k = self.keys
        keys = [k.groups, k.ledger, k.state, k.arrived, k.unsettled, k.events, k.outstanding, k.expiries, k.contained]
        epoch = int(self._run("begin", keys, [LEARNER, version, *contained]))
        self._recorded = (epoch, version)
        return epoch

    def take(self, epoch: int, count: int, block_ms: int) -> list[Delivery]:
        """Up to `count` groups, after at most `block_ms` (and 5 s). Empty if there are none, or none that is a group:
        an entry that cannot be decoded, or that no lease produced, is dead-lettered with the reason and skipped.

        Raises:
            FencedError: a newer incarnation began.
            HeadraceError: LOST, as `step`; noticed when nothing comes, which may be why.
        """
        deliveries = []
        for entry_id, group_id, payload, origin in self._take(epoch, count, block_ms):
            try:
                deliveries.append(self._delivery(entry_id, group_id, payload, origin))
            except WireError as error:
                _log.warning("group entry %s dead-lettered: %s", entry_id, error)
                self._drop(epoch, "dead", str(error), 0, [(entry_id, group_id, b"")])
        return deliveries

    def expire(self, epoch: int, deliveries: Sequence[Delivery]) -> None:
        """These are too old to train: they go, and in the same step their prompts are released again, as fresh ones
        under the current version. Expired and released both count it. FencedError as `take`."""
        if deliveries:
            version, prompts = self._prompts_of(deliveries)
            entries = [(d.entry_id, d.group.group_id, prompt) for d, prompt in zip(deliveries, prompts, strict=True)]
            self._drop(epoch, "expired", "", version, entries)

    def discard(self, epoch: int, deliveries: Sequence[Delivery]) -> None:
        """These hold nothing that can be trained, however fresh: they count as expired and do not come back, since
        sampled again they would be the same. Their budget is free. FencedError as `take`."""
        self._drop(epoch, "expired", "", 0, [(each.entry_id, each.group.group_id, b"") for each in deliveries])

    def step(self, epoch: int, version: int, deliveries: Sequence[Delivery], settle: Collection[str] = ()) -> int:
        """The optimizer steps that made `version`, the one after the last, trained these. With `settle`, as that with
        these group ids, in the same call; returns as it does.

        Raises:
            FencedError: as `take`.
            HeadraceError: LOST, the server came back without writes it had acknowledged (a power cut). Nothing was
                recorded; a learner that resumes from the newest checkpoint puts it right.
        """
        return self._train(epoch, version, deliveries, settle)

    def settle(self, epoch: int, group_ids: Collection[str]) -> int:
        """The effect of these trained groups is durable: acknowledge and delete them. FencedError as `take`.

        Returns:
            How many were settled now; groups that were never trained, or are settled already, do not count.
        """
        return self._train(epoch, None, (), group_ids) if group_ids else 0

    def outstanding_until(self, versions: Sequence[int]) -> list[int]:
        """For each of `versions`, how many of the outstanding groups were released at that version or before, wherever
        they are now."""
        count = partial(self._client.zcount, self.keys.outstanding, "-inf")
        return [int(self._call(partial(count, version))) for version in versions]

    def hold(self, epoch: int) -> None:
        """Make sure that this incarnation is the newest. FencedError as `take`."""
        self._train(epoch, None, (), ())

    def version(self) -> int:
        """The learner's policy version."""
        return int(self._call(lambda: self._client.hget(self.keys.state, "version")) or 0)

    def finish(self) -> None:
        """The run has reached its last step."""
        self._run("finish", [self.keys.state, self.keys.events], [])

    def finished(self) -> bool:
        """Whether the run has reached its last step, and no learner has begun since."""
        return self._call(lambda: self._client.hget(self.keys.state, "finished")) is not None

    def _train(self, epoch: int, version: int | None, trained: Sequence[Delivery], settled: Collection[str]) -> int:
        k = self.keys
        keys = [k.groups, k.ledger, k.state, k.arrived, k.unsettled, k.events, k.outstanding, k.expiries]
        ids, entries = [each.group.group_id for each in trained], [each.entry_id for each in trained]
        args: list[str | bytes | int] = [learner_group(epoch), epoch, "" if version is None else version]
        args += [len(ids), *ids, *entries, *settled]
        settled_now = int(self._run("train", keys, args))
        if version is not None:
            self._recorded = (epoch, version)
        return settled_now

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

    def _take(self, epoch: int, count: int, block_ms: int) -> list[_Entry]:
        """Up to `count` entries, which this epoch holds from now on. Payloads do not pass through Lua, which would cost
        more than all the rest; the consumer group, which is the epoch's own, is what fences.

        A call that is repeated, since its reply was lost, asks first for what this epoch holds beyond the newest entry
        that arrived here, so that nothing stays behind.

        Where an entry came from is asked only if the stream has more of them than leases brought.
        """
        k, group, consumer = self.keys, learner_group(epoch), f"epoch-{epoch}"
        arrived_epoch, newest = self._newest_taken
        block = min(block_ms, MAX_BLOCK_MS) if block_ms > 0 else None
        read = partial(self._client.xreadgroup, group, consumer, count=count)

        def once() -> tuple[Any, bool]:
            if self._in_doubt:
                held = read({k.groups: newest if arrived_epoch == epoch else "0"})[0][1]
                if held:
                    return held, False
            self._in_doubt = True
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xreadgroup(group, consumer, {k.groups: ">"}, count=count, block=block)
                pipe.hlen(k.arrived)  # before the length: what is submitted in between makes them differ
                pipe.xlen(k.groups)
                reply, leased, length = replies(pipe)
            self._in_doubt = False
            return (reply[0][1] if reply else []), leased == length

        try:
            found, all_leased = self._call(once)
        except HeadraceError as error:
            if isinstance(error.__cause__, redis.ResponseError):
                self.hold(epoch)  # there is no such consumer group: a newer learner began, if this says so
            raise
        if not found:
            self._check_version(epoch)
            return []
        # An entry that was deleted while it was held has no fields.
        entries = [(entry_id.decode(), fields or {}) for entry_id, fields in found]
        self._newest_taken = (epoch, entries[-1][0])
        ids = [fields.get(b"g", b"") for _, fields in entries]
        origins = [_LEASED] * len(ids)
        if not all_leased:
            arrived = self._call(lambda: self._client.hmget(k.arrived, ids))
            origins = [_origin(entry_id, came) for (entry_id, _), came in zip(entries, arrived, strict=True)]
        return [
            (entry_id, group_id.decode(errors="replace"), fields.get(b"p", b""), origin)
            for (entry_id, fields), group_id, origin in zip(entries, ids, origins, strict=True)
        ]

    def _check_version(self, epoch: int) -> None:
        """A server that came back without the last steps holds groups for this learner that it has trained; no others
        would ever come, since they take the whole budget."""
        recorded_epoch, recorded = self._recorded
        if epoch == recorded_epoch and self.version() < recorded:
            raise HeadraceError(f"LOST writes of learner epoch {epoch}: the server no longer knows version {recorded}")

    def _prompts_of(self, deliveries: Sequence[Delivery]) -> tuple[int, list[bytes]]:
        """The policy version, and the prompt of each group as it is to be released at that version; empty where none
        can be read."""
        version = int(self._call(lambda: self._client.hget(self.keys.state, "version")))
        prompts = []
        for delivery in deliveries:
            entries = self._call(partial(self._client.xrange, self.keys.groups, delivery.entry_id, delivery.entry_id))
            try:
                prompt = wire.decode_prompt(entries[0][1].get(b"q", b"") if entries else b"")
                prompts.append(wire.encode_prompt(replace(prompt, released_version=version)))
            except WireError as error:
                _log.warning("group %s expires for good, its prompt is lost: %s", delivery.group.group_id, error)
                prompts.append(b"")
        return version, prompts

    def _drop(
        self, epoch: int, counter: str, error: str, version: int, entries: Sequence[tuple[str, str, bytes]]
    ) -> None:
        if entries:
            k = self.keys
            keys = [k.groups, k.dead, k.ledger, k.state, k.arrived, k.unsettled, k.events]
            keys += [k.prompts, k.outstanding, k.expiries]
            values = [value for entry in entries for value in entry]
            self._run("drop", keys, [learner_group(epoch), epoch, counter, error, version, *values])


def _origin(entry_id: str, arrived: bytes | None) -> int:
    """`arrived`: the entry under which the group of this one came through a lease, and that lease's."""
    if arrived is None:
        return _FOREIGN
    return _LEASED if arrived.decode().split()[0] == entry_id else _DUPLICATE
