"""The connection to Redis or Valkey: where it is, whether it will do, and calls that survive its restarts.

A call is repeated while the server cannot be reached, up to `RECONNECT_S`; therefore every write behind it is safe to
send twice. Errors of the server that a caller must tell apart become our own: a fenced learner gets `FencedError`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from broker.keys import GENERATORS, LEARNER, Keys
from broker.server import MINIMUM_VERSION, read_endpoint
from common.config import Config
from common.errors import ConfigError, FencedError, HeadraceError

URL_VARIABLE = "HEADRACE_REDIS_URL"
PASSWORD_VARIABLE = "HEADRACE_REDIS_PASSWORD"

RECONNECT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
# A blocking read must end well before the socket gives up on it.
SOCKET_TIMEOUT_S = 15.0
MAX_BLOCK_MS = 5000

_SCRIPTS = (
    "append", "begin", "close", "drop", "eval_answer", "eval_begin", "eval_end", "eval_lease", "heartbeat", "ledger",
    "reclaim", "release", "renew", "settle", "step",
)  # fmt: skip

_T = TypeVar("_T")
_log = logging.getLogger("headrace.broker")


@dataclass(frozen=True)
class Endpoint:
    """A server's URL (never with a password) and its password."""

    url: str
    password: str | None


def endpoint(config: Config) -> Endpoint:
    """Where this run's server is: `broker.url`, else HEADRACE_REDIS_URL, else the server `headrace up` runs for it.

    Raises:
        ConfigError: nowhere, or the password file cannot be read.
    """
    url = config.broker.url or os.environ.get(URL_VARIABLE)
    if url:
        return Endpoint(url, _password(config))
    try:
        return Endpoint(*read_endpoint(config.run.folder))
    except OSError:
        raise ConfigError(
            f"broker.url is null, {URL_VARIABLE} is not set and no server of `headrace up` runs in "
            f"{config.run.folder}; set one of them, or start the run with `headrace up`"
        ) from None


def _password(config: Config) -> str | None:
    # The variable belongs to the server `up` started; a configured URL goes with the configured file.
    file, variable = config.broker.password_file, os.environ.get(PASSWORD_VARIABLE)
    if file is None or (variable and not config.broker.url):
        return variable or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"broker.password_file: {file} cannot be read: {error}") from None


def open_client(where: Endpoint) -> Any:
    """A client of a server that was seen to answer and to be new enough.

    Raises:
        ConfigError: nothing there, wrong password, or older than 7.0.
    """
    try:
        client = redis.Redis.from_url(
            where.url,
            password=where.password,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=30,
        )
        found = str(client.info("server")["redis_version"])
    except redis.AuthenticationError as error:
        raise ConfigError(
            f"broker {where.url}: the password was refused ({error}); set broker.password_file or {PASSWORD_VARIABLE}"
        ) from None
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"broker {where.url}: no Redis or Valkey server answers there ({error})") from None
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM_VERSION:
        raise ConfigError(f"broker {where.url}: the server is version {found}; use Redis >= 7.0 or Valkey")
    return client


@cache
def script_text(name: str) -> str:
    return (files("broker") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _transient(error: BaseException) -> bool:
    # redis-py derives AuthenticationError from ConnectionError; waiting does not make a password right.
    return isinstance(error, redis.ConnectionError | redis.TimeoutError) and not isinstance(
        error, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError
    )


def _retrying() -> Retrying:
    return Retrying(
        retry=retry_if_exception(_transient),
        stop=stop_after_delay(RECONNECT_S),
        wait=wait_random_exponential(multiplier=0.05, max=2.0),
        before_sleep=_say_waiting,
        reraise=True,
    )


def _say_waiting(state: RetryCallState) -> None:
    if state.attempt_number == 1:  # one line per outage; one failure before, which is often just a stale connection
        error = state.outcome.exception() if state.outcome else None
        _log.warning("the broker does not answer (%s); trying for %d s", error, RECONNECT_S)


class Link:
    """A connection to one run's keys. Thread-safe: redis-py takes a connection from its pool for each call."""

    def __init__(self, client: Any, config: Config, url: str = "") -> None:
        self.config = config
        self.keys = Keys(config.run.run_id)
        self.url = url
        self._client = client
        self._scripts = {name: client.register_script(script_text(name)) for name in _SCRIPTS}
        k = self.keys
        for stream, group in ((k.prompts, GENERATORS), (k.eval, GENERATORS), (k.groups, LEARNER)):
            self._create_group(stream, group)

    def close(self) -> None:
        self._client.close()

    def _create_group(self, stream: str, group: str) -> None:
        try:
            self._call(lambda: self._client.xgroup_create(stream, group, id="0", mkstream=True))
        except HeadraceError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script of `broker/lua`."""
        return self._call(lambda: self._scripts[script](keys=keys, args=args))

    def _call(self, function: Callable[[], _T]) -> _T:
        """`function()`, repeated while the server cannot be reached.

        Raises:
            FencedError: the server says that this learner was replaced.
            HeadraceError: unreachable for RECONNECT_S, or an error of the server.
        """
        try:
            try:
                return function()
            except redis.RedisError as error:
                if not _transient(error):
                    raise
            # Only now, since the machinery costs as much as a call that succeeds.
            return _retrying()(function)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise HeadraceError(f"broker {self.url}: no answer for {RECONNECT_S:.0f} s: {error}") from error
        except redis.OutOfMemoryError as error:
            raise BrokerFullError(
                f"broker {self.url}: at its memory limit; raise broker.maxmemory_mb, or the server's maxmemory"
            ) from error
        except redis.ResponseError as error:
            if str(error).startswith("FENCED"):
                raise FencedError(
                    f"run {self.config.run.run_id}: a newer learner took over ({str(error).split(' script:')[0]})"
                ) from error
            raise HeadraceError(f"broker {self.url}: {error}") from error


class BrokerFullError(HeadraceError):
    """The server is at its memory limit. Reading, submitting and settling still work; releasing waits."""
