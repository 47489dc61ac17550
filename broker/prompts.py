"""The prompt side: the feeder releases, generators lease and answer, the reclaimer takes back.

Promise: a lease ends exactly once, whoever ends it. Its entry id names it; once it is closed or taken back that id is
gone, and whatever its old holder still sends is refused and counted as a duplicate.

What a holder has sampled of an unfinished group it may keep beside the prompt (`keep_partial`). It survives the lease
where that is given back or taken back, comes with the next one, and goes in the step that ends the lease for good:
submitted, filtered, failed or dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.keys import GENERATORS
from broker.link import MAX_BLOCK_MS, Link, _log
from broker.pressure import BrokerFullError
from broker.records import FilteredKind, Lease
from common import wire
from common.errors import WireError
from common.trajectory import Group, PartialGroup, Prompt
from common.wirepartial import decode_partial, encode_partial

# Leases taken back per call: bounds the time one script holds the server.
_RECLAIM_LIMIT = 128


class PromptQueue(Link):
    """Methods of `Broker` around the `prompts` stream."""

    def position(self) -> int:
        """How many prompts of the source were ever released."""
        return int(self._call(lambda: self._client.hget(self.keys.state, "position")) or 0)

    def release(self, prompts: Sequence[Prompt], position: int, most_outstanding: int | None = None) -> bool:
        """Release `prompts`, the source's prompts from `position` on, all or none.

        Args:
            prompts: what to release.
            position: of the first of them.
            most_outstanding: groups that may be outstanding afterwards, these included; None: any number.

        Returns:
            False: the position is not `position` any more (another feeder, or an earlier copy of this call, released
            them), there is no budget for all of them, or the server is at its memory limit. Nothing was written; read
            `position()` and the ledger again.
        """
        if not prompts:
            return True
        k = self.keys
        args: list[str | bytes | int] = []
        for each in prompts:
            args += [each.group_id, each.released_version, wire.encode_prompt(each)]
        try:
            bound = "" if most_outstanding is None else most_outstanding
            return bool(self._run("release", [k.prompts, k.ledger, k.state, k.outstanding], [position, bound, *args]))
        except BrokerFullError:
            return False

    def lease(self, consumer: str, count: int, block_ms: int) -> list[Lease]:
        """Up to `count` prompts for generator `consumer`, after at most `block_ms` (and 5 s); empty if there are none.

        A prompt that cannot be decoded is dead-lettered and skipped.
        """
        block = min(block_ms, MAX_BLOCK_MS) if block_ms > 0 else None
        reply = self._call(
            lambda: self._client.xreadgroup(GENERATORS, consumer, {self.keys.prompts: ">"}, count=count, block=block)
        )
        leases = []
        for raw_id, fields in reply[0][1] if reply else []:
            entry_id = raw_id.decode()
            try:
                prompt = wire.decode_prompt(fields.get(b"p", b""))
            except WireError as error:
                _log.warning("prompt entry %s dead-lettered: %s", entry_id, error)
                self._close(consumer, entry_id, "dead", "", b"", str(error), "damaged")
            else:
                entry = (fields.get(b"t", b""), fields[b"p"])
                leases.append(Lease(entry_id, prompt, self._partial(prompt.group_id), entry))
        return leases

    def _partial(self, group_id: str) -> PartialGroup | None:
        """What was sampled of a group; to be read after its lease was taken, when nobody else can write it."""
        packed = self._call(lambda: self._client.hget(self.keys.partial, group_id))
        if packed is None:
            return None
        try:
            return decode_partial(packed, group_id, self.config.sampling.group_size)
        except WireError as error:
            _log.warning("prompt %s starts afresh, what was sampled of it cannot be read: %s", group_id, error)
            return None

    def keep_partial(self, consumer: str, entry_id: str, partial: PartialGroup) -> bool:
        """Keep what was sampled so far beside the prompt, in the place of what was kept before.

        Returns:
            False: the lease was taken over; nothing was written.

        Raises:
            BrokerFullError: the server is at its memory limit; nothing was written. It is not worth waiting for.
        """
        args: list[str | bytes | int] = [GENERATORS, consumer, entry_id, partial.group_id, encode_partial(partial)]
        return bool(self._run("partial", [self.keys.prompts, self.keys.partial], args))

    def renew(self, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Reset the idle time of `consumer`'s leases. Returns those it still holds; the others were taken back."""
        if not entry_ids:
            return []
        return [held.decode() for held in self._run("renew", [self.keys.prompts], [GENERATORS, consumer, *entry_ids])]

    def submit(self, consumer: str, lease: Lease, group: Group) -> bool:
        """Hand in the group of a lease: it enters the stream and the lease closes, in one step.

        Returns:
            False: the lease was taken over. The group is discarded and counted as a duplicate.

        Raises:
            BrokerFullError: the server is at its memory limit; the lease is still held.
            ValueError: the group is not the lease's.
        """
        if group.group_id != lease.prompt.group_id:
            raise ValueError(f"lease {lease.entry_id} is of group {lease.prompt.group_id}, not of {group.group_id}")
        return self._submit(consumer, lease, wire.encode_group(group))

    def filtered(self, consumer: str, entry_id: str, kind: FilteredKind) -> bool:
        """Report that a lease gave an uninformative group; its budget is free at once. Returns as `submit`."""
        return self._close(consumer, entry_id, f"filtered_{kind}", "", b"")

    def fail(self, consumer: str, entry_id: str, prompt: Prompt, error: str) -> None:
        """A data failure of this prompt: released again as its next attempt, after `max_attempts` dead-lettered."""
        if prompt.attempt + 1 < self.config.broker.max_attempts:
            again = wire.encode_prompt(replace(prompt, attempt=prompt.attempt + 1))
            self._close(consumer, entry_id, "retried", prompt.group_id, again)
        else:
            _log.warning("prompt %s dead-lettered after %d attempts: %s", prompt.group_id, prompt.attempt + 1, error)
            self._close(consumer, entry_id, "dead", prompt.group_id, b"", error, "data")

    def give_back(self, consumer: str, entry_id: str, prompt: Prompt) -> None:
        """An infrastructure failure, or the generator leaves: released again, the prompt loses nothing, nor does it
        lose what was kept beside it."""
        self._close(consumer, entry_id, "retried", prompt.group_id, wire.encode_prompt(prompt), keep="keep")

    def reclaim(self) -> list[tuple[str, str]]:
        """Take back leases that were not renewed for `lease_ttl_s`, or whose holder is not a living member; those of
        evaluation prompts too.

        Returns:
            Entry id (gone now) and consumer of each lease taken back, at most 128 a stream and call.
        """
        broker = self.config.broker
        ttls = [_ms(broker.lease_ttl_s), _ms(broker.member_ttl_s)]
        return [
            (entry_id.decode(), consumer.decode())
            for stream in (self.keys.prompts, self.keys.eval)
            for entry_id, consumer in self._run(
                "reclaim",
                [stream, self.keys.members, self.keys.closed, self.keys.drains],
                [GENERATORS, *ttls, _RECLAIM_LIMIT],
            )
        ]

    def _submit(self, consumer: str, lease: Lease, payload: bytes) -> bool:
        k = self.keys
        keys = [k.prompts, k.groups, k.ledger, k.closed, k.arrived, k.outstanding, k.expiries, k.contained, k.partial]
        group_id, (released, prompt) = lease.prompt.group_id, lease.entry
        args: list[str | bytes | int] = [GENERATORS, consumer, lease.entry_id, group_id, released, prompt, payload]
        return bool(self._run("submit", keys, args))

    def _close(
        self,
        consumer: str,
        entry_id: str,
        outcome: str,
        group_id: str,
        payload: bytes,
        error: str = "",
        kind: str = "",
        keep: str = "",
    ) -> bool:
        k = self.keys
        keys = [k.prompts, k.dead, k.ledger, k.closed, k.events, k.outstanding, k.expiries, k.partial]
        args: list[str | bytes | int] = [GENERATORS, consumer, entry_id, outcome, group_id, payload, error, kind, keep]
        return bool(self._run("close", keys, args))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
