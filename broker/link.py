"""The connection to Redis or Valkey: scripts, and calls that survive its restarts.

A call is repeated while the server cannot be reached, up to `broker.reconnect_s`; therefore every write behind it is
safe to send twice. Errors of the server that a caller must tell apart become our own: a fenced learner gets
`FencedError`, a producer at the memory limit `BrokerFullError`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import redis
from redis.exceptions import RedisClusterException
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from broker.keys import GENERATORS, Keys
from broker.pressure import BrokerFullError, Pressure
from common.config import Config
from common.errors import FencedError, HeadraceError

# A blocking read must end well before the socket gives up on it (`broker.clients.SOCKET_TIMEOUT_S`).
MAX_BLOCK_MS = 5000

# What the server refuses at its memory limit; all other scripts run there too, they are what frees memory.
GROWING = frozenset({"eval_begin", "partial", "release", "submit"})

# A failover or a restart under way, as a server says it that does answer.
_MOVING = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNBLOCKED")

_T = TypeVar("_T")
_log = logging.getLogger("headrace.broker")


@cache
def _script(name: str) -> tuple[str, str]:
    """Text and SHA-1 of a script."""
    text = (files("broker") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _transient(error: BaseException) -> bool:
    # redis-py derives AuthenticationError from ConnectionError; waiting does not make a password right.
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ResponseError):
        moved = redis.ReadOnlyError | redis.exceptions.ClusterError | redis.exceptions.AskError
        return isinstance(error, moved) or str(error).startswith(_MOVING)
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | RedisClusterException)


def replies(pipe: Any) -> list[Any]:
    """Execute a pipeline. Raises its first error as the server said it; redis-py would put the command before it."""
    found: list[Any] = pipe.execute(raise_on_error=False)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


class Link:
    """A connection to one run's keys. Thread-safe: redis-py takes a connection from its pool for each call."""

    def __init__(self, client: Any, config: Config, url: str = "") -> None:
        self.config = config
        self.keys = Keys(config.run.run_id)
        self.url = url
        self.pressure = Pressure(url)
        self._client = client

    def open(self) -> None:
        """Make the streams that generators read, where they are not there yet."""
        k = self.keys
        self._run("open", [k.prompts, k.eval], [GENERATORS, GENERATORS])

    def close(self) -> None:
        self._client.close()

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script of `broker/lua`.

        Raises:
            BrokerFullError: the server is at its memory limit and this script would add to what it holds.
        """
        text, sha = _script(script)

        def run() -> Any:
            try:
                return self._client.evalsha(sha, len(keys), *keys, *args)
            except redis.exceptions.NoScriptError:  # a server that started again, or took over, has none
                return self._client.eval(text, len(keys), *keys, *args)

        reply = self._call(run)
        if script in GROWING:
            self.pressure.accepted()
        return reply

    def _call(self, function: Callable[[], _T]) -> _T:
        """`function()`, repeated while the server cannot be reached.

        Raises:
            FencedError: the server says that this learner was replaced.
            HeadraceError: unreachable for `broker.reconnect_s`, or an error of the server.
        """
        deadline_s = self.config.broker.reconnect_s
        try:
            try:
                return function()
            except (redis.RedisError, RedisClusterException) as error:
                if not _transient(error):
                    raise
                self._before_retry(error, 1)
            # Only now, since the machinery costs as much as a call that succeeds.
            retrying = Retrying(
                retry=retry_if_exception(_transient),
                stop=stop_after_delay(deadline_s),
                wait=wait_random_exponential(multiplier=0.05, max=2.0),
                before_sleep=lambda state: self._before_retry(
                    state.outcome.exception() if state.outcome else None, state.attempt_number + 1
                ),
                reraise=True,
            )
            return retrying(function)
        except redis.OutOfMemoryError as error:
            why = "it is at its memory limit; raise broker.maxmemory_mb, or the server's maxmemory"
            raise self._full(why) from error
        except (redis.RedisError, RedisClusterException) as error:
            if _transient(error):
                raise HeadraceError(f"broker {self.url}: no answer for {deadline_s:.0f} s: {error}") from error
            raise self._translated(error) from error

    def _full(self, why: str) -> BrokerFullError:
        self.pressure.refused(why)
        return BrokerFullError(f"broker {self.url}: {why}")

    def _translated(self, error: Exception) -> HeadraceError:
        run = self.config.run.run_id
        if str(error).startswith("FENCED"):
            return FencedError(f"run {run}: a newer learner took over ({str(error).split(' script:')[0]})")
        if str(error).startswith("NOGROUP") or "requires the key to exist" in str(error):
            return HeadraceError(f"broker {self.url}: run {run} is not, or no longer, on this server ({error})")
        if isinstance(error, redis.exceptions.NoPermissionError) or str(error).startswith("ACL failure in script"):
            return HeadraceError(f"broker {self.url}: {error}; `headrace broker acl` prints what each role needs")
        return HeadraceError(f"broker {self.url}: {error}")

    def _before_retry(self, error: BaseException | None, attempts: int) -> None:
        pool = getattr(self._client, "connection_pool", None)
        if isinstance(error, redis.ReadOnlyError) and pool is not None:
            pool.disconnect(inuse_connections=False)  # this server was demoted; its name may lead to another one now
        if attempts == 2:  # one line per outage; the first failure is often just a stale connection
            _log.warning("the broker does not answer (%s); trying for %g s", error, self.config.broker.reconnect_s)
