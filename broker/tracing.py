"""What happens to sampled prompts, written down as it happens: the `trace` stream.

A hash of the group's id decides whether it is traced, so all processes decide alike without talking. Each of them
appends a line right after what the line says was done; its time is the entry's id, the server's clock. The stream is
capped. Without `tracing.sample` nothing is written and nothing is asked. A line that cannot be written is left out: no
trace is worth a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
from redis.exceptions import RedisClusterException

from broker.groups import GroupQueue
from broker.link import _log
from broker.prompts import PromptQueue
from broker.records import Delivery, Lease
from common.config import Config
from common.trajectory import Group, Prompt

KEPT = 50_000  # lines, of some 150 bytes
_PAGE = 1000
_LEASES = 4096
# What ends a life. After `expired` a prompt is released again, after `failed`, `given back`, `reclaimed` leased again.
ENDS = frozenset({"settled", "filtered", "dead", "discarded"})
# What another process wrote that comes before.
_BEFORE = {"leased": "released", "taken": "submitted"}


@dataclass(frozen=True)
class Event:
    """Something that happened to a group.

    Attributes:
        at_ms: when, in milliseconds since 1970 by the server's clock.
        name: released, leased, sampled, scored, submitted, taken, trained, settled; filtered, failed, given back,
            reclaimed, late, expired, discarded, dead.
        group_id: of the group; empty for `reclaimed`, which knows the lease alone.
        member: who did it, or held the lease.
        version: the policy's, where it is known.
        detail: the lease of `leased`, `reclaimed` and `late`; else a reason.
    """

    at_ms: int
    name: str
    group_id: str
    member: str = ""
    version: int | None = None
    detail: str = ""


def chosen(group_id: str, share: float) -> bool:
    """Whether this group is traced."""
    if share <= 0:
        return False
    return int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest()) < share * 2**64


def in_order(events: Iterable[Event]) -> list[Event]:
    """The events of one life, oldest first. A line is written a round trip after what it tells of, so the process that
    goes on with a prompt may be faster than the line of the one before; such a line gets the other's time."""
    found: list[Event] = []
    for event in events:
        if found and _BEFORE.get(found[-1].name) == event.name:
            found.insert(-1, replace(event, at_ms=found[-1].at_ms))
        else:
            found.append(event)
    return found


class Traced(PromptQueue, GroupQueue):
    """The prompt side and the group side of `Broker`, with a line for each thing that happens to a traced group."""

    def __init__(self, client: Any, config: Config, url: str = "") -> None:
        super().__init__(client, config, url)
        self._leased: dict[str, str] = {}  # traced leases: entry id -> group id
        self._untraced = False

    def traces(self, group_id: str) -> bool:
        return chosen(group_id, self.config.tracing.sample)

    def mark(
        self, name: str, group_ids: Iterable[str], member: str = "", version: int | None = None, detail: str = ""
    ) -> None:
        """This has happened to those of the groups that are traced."""
        if self.config.tracing.sample > 0:
            self._note([each for each in group_ids if self.traces(each)], name, member, version, detail)

    def life(self, group_id: str) -> list[Event]:
        """What is still known of a group, oldest first."""
        events, leases = [], set()
        for event in self.trace():
            if event.group_id == group_id:
                events.append(event)
                leases.add(event.detail if event.name == "leased" else "")
            elif event.name == "reclaimed" and event.detail in leases:
                events.append(event)
        return in_order(events)

    def trace(self) -> Iterable[Event]:
        """Everything that is kept, oldest first."""
        after = "-"
        while True:
            page = self._call(lambda start=after: self._client.xrange(self.keys.trace, start, count=_PAGE))  # type: ignore[misc]
            yield from (_event(entry_id, fields) for entry_id, fields in page)
            if len(page) < _PAGE:
                return
            after = f"({page[-1][0].decode()}"

    def trace_after(self, seen: str, block_ms: int) -> tuple[str, list[Event]]:
        """What was written after the entry `seen` ("0": from the oldest kept), and the newest entry now seen. Waits at
        most `block_ms`, which must be less than 5 s; 0: does not wait."""
        reply = self._call(lambda: self._client.xread({self.keys.trace: seen}, count=_PAGE, block=block_ms or None))
        entries = reply[0][1] if reply else []
        return entries[-1][0].decode() if entries else seen, [_event(*entry) for entry in entries]

    def _note(self, group_ids: Sequence[str], name: str, member: str, version: int | None, detail: str) -> None:
        if not group_ids:
            return
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for group_id in group_ids:
                    fields = {"g": group_id, "e": name, "m": member, "v": "" if version is None else version}
                    pipe.xadd(self.keys.trace, {**fields, "d": detail[:200]}, maxlen=KEPT, approximate=True)
                pipe.execute()
        except (redis.RedisError, RedisClusterException) as error:
            if not self._untraced:
                _log.warning("traces have gaps, the first: %r of group %s: %s", name, group_ids[0], error)
            self._untraced = True

    # --- what happens

    def release(self, prompts: Sequence[Prompt], position: int, most_outstanding: int | None = None) -> bool:
        done = super().release(prompts, position, most_outstanding)
        if done and prompts:
            self.mark("released", [each.group_id for each in prompts], version=prompts[0].released_version)
        return done

    def lease(self, consumer: str, count: int, block_ms: int) -> list[Lease]:
        leases = super().lease(consumer, count, block_ms)
        for each in leases:
            if self.traces(each.prompt.group_id):
                self._leased[each.entry_id] = each.prompt.group_id
                self.mark("leased", [each.prompt.group_id], consumer, detail=each.entry_id)
        while len(self._leased) > _LEASES:  # of those that were taken over nobody says that they ended
            del self._leased[next(iter(self._leased))]
        return leases

    def submit(self, consumer: str, lease: Lease, group: Group) -> bool:
        taken = super().submit(consumer, lease, group)
        self._leased.pop(lease.entry_id, None)
        newest = max((run.version for each in group.responses for run in each.versions), default=None)
        self.mark("submitted" if taken else "late", [group.group_id], consumer, newest, lease.entry_id)
        return taken

    def reclaim(self) -> list[tuple[str, str]]:
        reclaimed = super().reclaim()
        for entry_id, consumer in reclaimed if self.config.tracing.sample > 0 else ():
            self._note([""], "reclaimed", consumer, None, entry_id)
        return reclaimed

    def begin(self, version: int, contained: Collection[str]) -> int:
        epoch = super().begin(version, contained)
        self.mark("settled", contained, f"learner-{epoch}", version)
        return epoch

    def take(self, epoch: int, count: int, block_ms: int) -> list[Delivery]:
        deliveries = super().take(epoch, count, block_ms)
        self.mark("taken", [each.group.group_id for each in deliveries], f"learner-{epoch}")
        return deliveries

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
        closed = super()._close(consumer, entry_id, outcome, group_id, payload, error, kind, keep)
        name, _, why = outcome.partition("_")
        if name == "retried":
            name = "given back" if keep else "failed"
        known = self._leased.pop(entry_id, group_id)
        self.mark(name if closed else "late", [known] if known else [], consumer, detail=error or why)
        return closed

    def _train(self, epoch: int, version: int | None, trained: Sequence[Delivery], settled: Collection[str]) -> int:
        count = super()._train(epoch, version, trained, settled)
        self.mark("trained", [each.group.group_id for each in trained], f"learner-{epoch}", version)
        self.mark("settled", settled, f"learner-{epoch}")
        return count

    def _drop(
        self, epoch: int, counter: str, error: str, version: int, entries: Sequence[tuple[str, str, bytes]]
    ) -> None:
        super()._drop(epoch, counter, error, version, entries)
        for _, group_id, prompt in entries:
            name = counter if prompt or counter == "dead" else "discarded"
            self.mark(name, [group_id], f"learner-{epoch}", version if prompt else None, error)


_FIELDS = (b"g", b"e", b"m", b"v", b"d")


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> Event:
    group_id, name, member, version, detail = (fields.get(key, b"").decode(errors="replace") for key in _FIELDS)
    at_ms = int(entry_id.partition(b"-")[0])
    return Event(at_ms, name, group_id, member, int(version) if version.isdecimal() else None, detail)
