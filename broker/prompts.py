"""The prompt side: the feeder releases, generators lease and answer, the reclaimer takes back.

Promise: a lease ends exactly once, whoever ends it. Its entry id names it; once it is closed or taken back that id is
gone, and whatever its old holder still sends is refused and counted as a duplicate.
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
from common.trajectory import Group, Prompt

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
                leases.append(Lease(entry_id, wire.decode_prompt(fields.get(b"p", b""))))
            except WireError as error:
                _log.warning("prompt entry %s dead-lettered: %s", entry_id, error)
                self._close(consumer, entry_id, "dead", "", b"", str(error), "damaged")
        return leases

    def renew(self, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Reset the idle time of `consumer`'s leases. Returns those it still holds; the others were taken back."""
        if not entry_ids:
            return []
        return [held.decode() for held in self._run("renew", [self.keys.prompts], [GENERATORS, consumer, *entry_ids])]

    def submit(self, consumer: str, entry_id: str, group: Group) -> bool:
        """Hand in the group of a lease: it enters the stream and the lease closes, in one step.

        Returns:
            False: the lease was taken over. The group is discarded and counted as a duplicate.

        Raises:
            BrokerFullError: the server is at its memory limit; the lease is still held.
        """
        return self._close(consumer, entry_id, "submitted", group.group_id, wire.encode_group(group))

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
        """An infrastructure failure, or the generator leaves: released again, the prompt loses nothing."""
        self._close(consumer, entry_id, "retried", prompt.group_id, wire.encode_prompt(prompt))

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
                "reclaim", [stream, self.keys.members, self.keys.closed], [GENERATORS, *ttls, _RECLAIM_LIMIT]
            )
        ]

    def _close(
        self, consumer: str, entry_id: str, outcome: str, group_id: str, payload: bytes, error: str = "", kind: str = ""
    ) -> bool:
        k = self.keys
        keys = [k.prompts, k.groups, k.dead, k.ledger, k.closed, k.arrived, k.events, k.outstanding, k.expiries]
        keys.append(k.contained)
        script = "submit" if outcome == "submitted" else "close"
        args: list[str | bytes | int] = [GENERATORS, consumer, entry_id, outcome, group_id, payload, error, kind]
        return bool(self._run(script, keys, args))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
