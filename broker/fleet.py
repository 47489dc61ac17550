"""The fleet side: who is alive, what the learner announces, what the generators acknowledge, what just happened."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Any

from broker.link import MAX_BLOCK_MS, Link, _log
from broker.records import Member, Role
from common import wire
from common.errors import WireError

# Two messages a version on the control stream, with the model's parameter names in one of them; acknowledgements are
# small, and there are a few a version from every generator.
_CONTROL_LENGTH = 128
_ACKS_LENGTH = 4096

_ROLES = ("generator", "learner", "broker")
_STATES = ("joining", "syncing", "serving", "draining")


class Fleet(Link):
    """Methods of `Broker` around members, control messages and events."""

    def heartbeat(self, member: Member) -> bool:
        """Say that `member` is alive and what it does. Its `age_s` is ignored: the server's clock counts.

        Returns:
            Whether this process was asked to leave (`drain`).
        """
        body = asdict(member)
        del body["age_s"]
        packed = wire.pack("member", body)
        keys = [self.keys.members, self.keys.drains]
        return bool(self._run("heartbeat", keys, [member.id, packed, member.incarnation]))

    def drain(self, member: Member) -> None:
        """Ask `member` to leave; its next heartbeat is told. A later process of the same id is not meant."""
        self._call(lambda: self._client.hset(self.keys.drains, member.id, member.incarnation))

    def leave(self, id: str) -> None:
        """Take a member off the list at once."""
        self._call(lambda: self._client.hdel(self.keys.members, id))
        self._call(lambda: self._client.hdel(self.keys.drains, id))

    def members(self, role: Role | None = None) -> list[Member]:
        """Members whose last heartbeat is at most `member_ttl_s` old, in order of their ids."""
        seconds, microseconds, flat, _ = self._run("look", [self.keys.members, self.keys.answers], [])
        now_ms = seconds * 1000 + microseconds // 1000
        found = []
        for value in flat[1::2]:
            seen_ms, _, packed = value.partition(b" ")
            try:
                age_s = max(0, now_ms - int(seen_ms)) / 1000
                member = _member(packed, age_s)
            except (ValueError, WireError) as error:
                _log.warning("a member entry is skipped: %s", error)
                continue
            if age_s <= self.config.broker.member_ttl_s and role in (None, member.role):
                found.append(member)
        return sorted(found, key=lambda member: member.id)

    def announce(self, message: dict[str, Any]) -> str:
        """Append a message of plain values to the control stream; returns its id."""
        return self._append(self.keys.control, message, _CONTROL_LENGTH)

    def controls(self, after: str, block_ms: int) -> list[tuple[str, dict[str, Any]]]:
        """Ids and messages on the control stream after the id `after` ("0": from the oldest kept), oldest first.

        Waits at most `block_ms` (and 5 s) for one.
        """
        return self._messages(self.keys.control, after, block_ms)

    def last_control(self) -> str:
        """Id of the newest control message, "0-0" if there is none."""
        return self._last(self.keys.control)

    def acknowledge(self, message: dict[str, Any]) -> str:
        """Append a message of plain values to the acknowledgements; returns its id."""
        return self._append(self.keys.acks, message, _ACKS_LENGTH)

    def acks(self, after: str, block_ms: int) -> list[tuple[str, dict[str, Any]]]:
        """As `controls`, for the acknowledgements."""
        return self._messages(self.keys.acks, after, block_ms)

    def last_ack(self) -> str:
        """As `last_control`, for the acknowledgements."""
        return self._last(self.keys.acks)

    def wait_event(self, after: str, block_ms: int) -> str:
        """Wait until budget was freed or the version changed since the event `after` ("0": since the beginning).

        Returns:
            Id of the newest event; `after` itself if none came within `block_ms` (and 5 s).
        """
        entries = self._read(self.keys.events, after, block_ms)
        return str(entries[-1][0].decode()) if entries else after

    def _append(self, stream: str, message: dict[str, Any], length: int) -> str:
        packed = wire.pack("message", {"body": message})
        return str(self._run("append", [stream], [uuid.uuid4().hex, packed, length]).decode())

    def _messages(self, stream: str, after: str, block_ms: int) -> list[tuple[str, dict[str, Any]]]:
        messages = []
        for entry_id, fields in self._read(stream, after, block_ms):
            try:
                body = wire.unpack(fields.get(b"p", b""), "message").get("body")
                if not isinstance(body, dict):
                    raise WireError(f"body is a {type(body).__name__}; expected a map")
            except WireError as error:
                _log.warning("message %s is skipped: %s", entry_id.decode(), error)
                body = {"type": "unreadable"}  # kept, so that the reader's position moves past it
            messages.append((entry_id.decode(), body))
        return messages

    def _read(self, stream: str, after: str, block_ms: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        block = min(block_ms, MAX_BLOCK_MS) if block_ms > 0 else None
        reply = self._call(lambda: self._client.xread({stream: after}, block=block))
        return reply[0][1] if reply else []

    def _last(self, stream: str) -> str:
        newest = self._call(lambda: self._client.xrevrange(stream, count=1))
        return str(newest[0][0].decode()) if newest else "0-0"


def _member(packed: bytes, age_s: float) -> Member:
    """Raises ValueError or WireError where the bytes are not a member."""
    body = wire.unpack(packed, "member")
    try:
        member = Member(
            id=str(body["id"]),
            role=body["role"],
            state=body["state"],
            version=int(body["version"]),
            epoch=int(body["epoch"]),
            host=str(body["host"]),
            pid=int(body["pid"]),
            counters={str(name): float(value) for name, value in body["counters"].items()},
            age_s=age_s,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a member: {error!r}") from None
    if member.role not in _ROLES or member.state not in _STATES:
        raise ValueError(f"member {member.id}: role {member.role!r}, state {member.state!r}")
    return member
