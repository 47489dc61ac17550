"""Start-up checks of the broker room: the server, the model's folder and tokenizer, the prompts. No model is loaded."""

from __future__ import annotations

import logging
import os

from broker.clients import URL_VARIABLE, endpoint, open_client
from broker.server import check_port, find_binary
from broker.sources import check_source
from common.config import Config

_log = logging.getLogger("headrace.broker")


def check(config: Config) -> None:
    """Raises ConfigError: no server or one too old, a port that is taken, a model or prompts that cannot be used."""
    if config.broker.address or os.environ.get(URL_VARIABLE):
        _check_server(config)
    else:
        find_binary()
        if config.broker.port is not None:
            check_port(config.broker.port)
    check_source(config)


def _check_server(config: Config) -> None:
    where = endpoint(config)
    client = open_client(where, config.broker)
    try:
        policy = client.info("memory").get("maxmemory_policy")  # CONFIG GET would need the right to read passwords
    finally:
        client.close()
    if policy not in (None, "noeviction"):
        _log.warning("broker %s: maxmemory-policy is %r; use 'noeviction', or groups may vanish", where.url, policy)
