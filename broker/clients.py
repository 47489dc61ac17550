"""Where the server is and a client for it: one server, sentinels that know it, or a cluster; with or without TLS.

All keys of a run lie in one slot (`broker.keys`), so that a cluster serves a run from one of its nodes.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from broker.server import MINIMUM_VERSION, read_endpoint
from common.config import BrokerConfig, Config, TlsConfig
from common.config_broker import check_url, scheme, sentinels
from common.errors import ConfigError

URL_VARIABLE = "HEADRACE_REDIS_URL"
USER_VARIABLE = "HEADRACE_REDIS_USER"
PASSWORD_VARIABLE = "HEADRACE_REDIS_PASSWORD"

CONNECT_TIMEOUT_S = 5.0
# A blocking read (`broker.link.MAX_BLOCK_MS`) must end well before the socket gives up on it.
SOCKET_TIMEOUT_S = 15.0
_SENTINEL_TIMEOUT_S = 2.0

# `Link` retries, with a deadline, and says so.
_NO_RETRY = Retry(NoBackoff(), 0)


@dataclass(frozen=True)
class Endpoint:
    """A server's URL (never with a password), its password, and the ACL user (None: the URL's, or the default one)."""

    url: str
    password: str | None
    user: str | None = None


def endpoint(config: Config) -> Endpoint:
    """Where this run's server is: `broker.url` or `broker.sentinel`, else HEADRACE_REDIS_URL, else the server `headrace
    up` runs for it.

    Raises:
        ConfigError: nowhere, an impossible URL, or the password file cannot be read.
    """
    url = config.broker.address or _url_of_environment(config.broker)
    if url:
        return Endpoint(url, _password(config), config.broker.user or os.environ.get(USER_VARIABLE) or None)
    try:
        return Endpoint(*read_endpoint(config.run.folder))
    except OSError:
        raise ConfigError(
            f"broker.url is null, {URL_VARIABLE} is not set and no server of `headrace up` runs in "
            f"{config.run.folder}; set one of them, or start the run with `headrace up`"
        ) from None


def _url_of_environment(broker: BrokerConfig) -> str | None:
    url = os.environ.get(URL_VARIABLE)
    if not url:
        return None
    try:
        # With the section it belongs to: cluster and tls do not go with every URL.
        BrokerConfig.model_validate({"url": check_url(url), "cluster": broker.cluster, "tls": broker.tls})
    except ValueError as error:  # pydantic's derives from it
        raise ConfigError(f"{URL_VARIABLE}: {_reason(error)}") from None
    return url


def _reason(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    return str(errors()[0]["msg"]).removeprefix("Value error, ") if errors else str(error)


def _password(config: Config) -> str | None:
    # The variable belongs to the server `up` started; a configured URL goes with the configured file.
    file, variable = config.broker.password_file, os.environ.get(PASSWORD_VARIABLE)
    if file is None or (variable and not config.broker.address):
        return variable or None
    return _secret("broker.password_file", file)


def _secret(field: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error}") from None


def open_client(where: Endpoint, broker: BrokerConfig) -> Any:
    """A client of a server that was seen to answer, to be new enough and to be of the configured kind.

    Raises:
        ConfigError: nothing there, wrong password, older than 7.0, a file of `broker.tls` that cannot be used, a node
            of a cluster without `broker.cluster` or the other way round.
    """
    try:
        client = _client(where, broker)
        server = client.info("server")
    except redis.AuthenticationError as error:
        raise ConfigError(
            f"broker {where.url}: user {where.user or 'default'}: the password was refused ({error}); set "
            f"broker.password_file or {PASSWORD_VARIABLE}, and broker.user or {USER_VARIABLE} where it is not 'default'"
        ) from None
    except RedisClusterException as error:
        raise ConfigError(
            f"broker {where.url}: no cluster answers there ({error}); broker.cluster is true: it must be a reachable "
            "node of a cluster whose slots are all served, else set it to false"
        ) from None
    except (redis.RedisError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"broker {where.url}: no Redis or Valkey server answers there ({error})") from None
    try:
        _check_kind(where, broker, server)
    except ConfigError:
        client.close()
        raise
    return client


def _client(where: Endpoint, broker: BrokerConfig) -> Any:
    kind = scheme(where.url)
    options: dict[str, Any] = {
        "username": where.user,
        "password": where.password,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 30,
    }
    if kind != "unix":
        options["socket_keepalive"] = True
    tls = tls_options(broker.tls or TlsConfig()) if kind.startswith("rediss") else {}
    if kind.endswith("+sentinel"):
        return _master(where.url, broker, {**options, **tls, "retry": _NO_RETRY}, {**tls, "ssl": True} if tls else {})
    if broker.cluster:
        return RedisCluster.from_url(where.url, retry=_NO_RETRY, **options, **tls)
    return redis.Redis.from_url(where.url, retry=_NO_RETRY, **options, **tls)


def _master(url: str, broker: BrokerConfig, options: dict[str, Any], tls: dict[str, Any]) -> Any:
    hosts, service = sentinels(url)
    file = broker.sentinel.password_file if broker.sentinel else None
    manager = Sentinel(
        hosts,
        sentinel_kwargs={
            "password": _secret("broker.sentinel.password_file", file) if file else None,
            "socket_timeout": _SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
            "retry": _NO_RETRY,
            **tls,
        },
    )
    return manager.master_for(service, **options, **({"ssl": True} if tls else {}))


def tls_options(tls: TlsConfig) -> dict[str, Any]:
    """redis-py's options for `tls`, its files seen to be usable. Raises ConfigError naming the field."""
    context = ssl.create_default_context()
    if tls.ca_file is not None:
        try:
            context.load_verify_locations(tls.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"broker.tls.ca_file: {tls.ca_file} holds no certificates in PEM ({error})") from None
    if tls.cert_file is not None and tls.key_file is not None:
        for name, file in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
            _secret(f"broker.tls.{name}", file)
        try:
            # A key that needs a passphrase would make OpenSSL ask for one on the terminal.
            context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"broker.tls: cert_file {tls.cert_file} and key_file {tls.key_file} are no pair of certificate and key "
                f"without a passphrase, in PEM ({error})"
            ) from None
    files = {"ssl_ca_certs": tls.ca_file, "ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        **{name: str(file) for name, file in files.items() if file is not None},
    }


def _check_kind(where: Endpoint, broker: BrokerConfig, server: dict[str, Any]) -> None:
    found, mode = str(server["redis_version"]), str(server.get("redis_mode") or server.get("server_mode"))
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM_VERSION:
        raise ConfigError(f"broker {where.url}: the server is version {found}; use Redis >= 7.0 or Valkey")
    if mode == "sentinel":
        raise ConfigError(f"broker {where.url}: a Sentinel answers there; use redis+sentinel://host:port/service")
    if mode == "cluster" and not broker.cluster:
        raise ConfigError(f"broker {where.url}: the server is a node of a cluster; set broker.cluster to true")
