"""By which address other machines of the run reach this one."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from common.config_broker import scheme, sentinels

LOOPBACK = "127.0.0.1"


def own_address(url: str) -> str:
    """The address from which this machine reaches the run's server, which the run's other machines reach too.

    Args:
        url: the server's, as in `broker.url`. Loopback where that is on this machine, or cannot be resolved.
    """
    if scheme(url) == "unix":
        return LOOPBACK
    if "+sentinel" in scheme(url):
        host, port = sentinels(url)[0][0]
    else:
        parts = urlsplit(url)
        host, port = parts.hostname or LOOPBACK, parts.port or 6379
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: sends nothing, but chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
