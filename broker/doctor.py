"""What `headrace doctor` asks the server and the data."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from broker.clients import URL_VARIABLE, endpoint, open_client
from broker.server import find_binary
from broker.sources import check_source
from broker.store import Broker
from common.config import Config
from common.doctor import Finding, fault, ok, resolves, warning
from common.errors import HeadraceError

_CONNECT_S = 3.0
_SKEW_S = 5.0  # ages and leases are the server's clock alone; logs and traces of several hosts are not


def server(config: Config) -> Iterator[Finding]:
    """Reachable, new enough, keeping what it is given, with room, and of about our time."""
    if not (config.broker.address or os.environ.get(URL_VARIABLE)):
        yield ok("redis", f"none configured; `headrace up` starts {find_binary()}")
        return
    where = endpoint(config)
    client = open_client(where, config.broker)
    try:
        info, memory = client.info("server"), client.info("memory")
        yield ok("redis", f"{where.url} answers, version {info['redis_version']}")
        yield _policy(memory)
        yield _room(memory)
        yield _persistence(client.info("persistence"))
        yield skew(client, time.time())
    finally:
        client.close()


def _policy(memory: dict[str, Any]) -> Finding:
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        return fault("redis", f"maxmemory-policy is {policy!r}: groups would vanish; set it to noeviction")
    return ok("redis", "maxmemory-policy is noeviction")


def _room(memory: dict[str, Any]) -> Finding:
    used, limit = int(memory["used_memory"]), int(memory["maxmemory"])
    if not limit:
        return warning("redis", "maxmemory is 0: the host's memory is the limit; set one")
    text = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB in use"
    return Finding("ok" if used < 0.9 * limit else "warning", "redis", text)


def _persistence(info: dict[str, Any]) -> Finding:
    if not int(info.get("aof_enabled", 0)):
        return warning("redis", "the append-only file is off: a restart of the server loses the run's groups")
    if info.get("aof_last_write_status", "ok") != "ok":
        return fault("redis", "the last write of the append-only file failed; look at the server's disk")
    return ok("redis", "the append-only file is on")


def skew(client: Any, now: float) -> Finding:
    """The server's clock against ours, `now` in seconds."""
    seconds, microseconds = client.time()
    off = seconds + microseconds / 1e6 - now
    if abs(off) > _SKEW_S:
        return fault("clock", f"this host is {-off:+.1f} s off the server's clock; run NTP on both")
    return ok("clock", f"{abs(off) * 1000:.0f} ms off the server's clock")


def data(config: Config) -> Iterator[Finding]:
    """The model's folder and tokenizer, and the prompts."""
    check_source(config)
    yield ok("prompts", f"{config.prompts.type} prompts and the tokenizer of {config.model.path} can be read")


def peers(config: Config) -> Iterator[Finding]:
    """Can the hosts of the run's living members be found from here, and the place where the learner's nodes meet?"""
    try:
        broker = Broker.connect(config, reader=True)
    except HeadraceError:  # said already
        return
    try:
        members = broker.members()
        hosts = {member.host for member in members if member.host}
        # Without a broker service it is where one was.
        place = broker.meeting() if any(member.role == "broker" for member in members) else None
    finally:
        broker.close()
    if place is not None:
        try:
            socket.create_connection((place.host, place.port), _CONNECT_S).close()
            yield ok("peers", f"the store in which the learner's nodes meet answers at {place.host}:{place.port}")
        except OSError as error:
            yield fault("peers", f"the store in which the learner's nodes meet, {place.host}:{place.port}: {error}")
    for host in sorted(hosts):
        yield resolves("peers", host, f"host {host!r} of a member does not resolve here")
