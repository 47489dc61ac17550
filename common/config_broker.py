"""The parts of the `broker` section that say where a server of one's own is and how to speak to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from common.config_section import Section

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_HOST_PORT = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/,@\[\]]+):\d{1,5}"
_SENTINEL = re.compile(rf"(?P<hosts>{_HOST_PORT}(?:,{_HOST_PORT})*)/(?P<service>[^/\s?]+)")

HostPort = Annotated[str, Field(pattern=f"^{_HOST_PORT}$")]


class SentinelConfig(Section):
    """Sentinels that know which server is the master now."""

    hosts: list[HostPort] = Field(min_length=1, description="Each `host:port`.")
    service: str = Field(pattern=r"^[^/\s?]+$", description="Name the sentinels give the master.")
    password_file: Path | None = Field(None, description="Password of the sentinels themselves, where they have one.")


class TlsConfig(Section):
    """TLS, for `rediss://` and `rediss+sentinel://` and, where it is given, `broker.sentinel`. The server's certificate
    must name the host one connects to."""

    ca_file: Path | None = Field(None, description="Certificates to trust, PEM. Null: those of the system.")
    cert_file: Path | None = Field(None, description="Certificate to show to the server, PEM.")
    key_file: Path | None = Field(None, description="Key of cert_file, PEM.")

    @model_validator(mode="after")
    def _pair(self) -> TlsConfig:
        if (self.cert_file is None) != (self.key_file is None):
            missing, given = ("key_file", "cert_file") if self.key_file is None else ("cert_file", "key_file")
            raise ValueError(f"{given} is set and {missing} is not; set both, or neither")
        return self


def scheme(url: str) -> str:
    return url.split("://", 1)[0]


def check_url(url: str) -> str:
    """`url`, if a server can be reached by it. Raises ValueError with what would be right, the password not shown."""
    kind, separator, rest = url.partition("://")
    if not separator or kind not in SCHEMES:
        raise ValueError(f"must start with {', '.join(f'{name}://' for name in SCHEMES[:-1])} or {SCHEMES[-1]}://")
    if ("@" in rest and ":" in rest.split("@", 1)[0]) or re.search(r"[?&]password=", rest):
        raise ValueError("must not contain a password: use broker.password_file or HEADRACE_REDIS_PASSWORD")
    if kind.endswith("+sentinel") and _SENTINEL.fullmatch(rest) is None:
        raise ValueError(f"must be {kind}://host:port[,host:port...]/service; the user goes into broker.user")
    return url


def sentinels(url: str) -> tuple[list[tuple[str, int]], str]:
    """Hosts with ports, and the service, of a `redis+sentinel://` URL that `check_url` has seen."""
    found = _SENTINEL.fullmatch(url.partition("://")[2])
    assert found is not None
    pairs = (each.rsplit(":", 1) for each in found["hosts"].split(","))
    return [(host.strip("[]"), int(port)) for host, port in pairs], found["service"]
