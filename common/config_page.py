"""The live page of a run, which the broker service serves."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.config_section import Section


class PageConfig(Section):
    """A page for a browser that shows the run as it goes on, and changes nothing."""

    enabled: bool = Field(True, description="False: never served, nor by `headrace up`.")
    port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="0: a free one, which the log names. Null: 0 under `headrace up`, else not served."
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on. One that others can reach, such as 0.0.0.0, needs a token."
    )
    token_file: Path | None = Field(
        None, description="File that holds the token a browser must bring; else HEADRACE_PAGE_TOKEN."
    )

    @property
    def served(self) -> bool:
        """Whether the broker service serves it."""
        return self.enabled and self.port is not None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may lead anywhere
            return False
