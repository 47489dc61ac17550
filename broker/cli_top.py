"""`headrace top`."""

from __future__ import annotations

import logging
import sys

from rich.console import Console

from broker.cli import RunId
from common import settings
from common.cli import ConfigPath, Overrides
from common.errors import ConfigError


def top(config: ConfigPath, run_id: RunId = None, overrides: Overrides = None) -> None:
    """Show a run as it goes on: stations, lag, members, dead letters; d asks the selected generator to leave."""
    from broker.audit import open_run
    from broker.runs import existing_run
    from broker.top import Top, keyboard

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top: needs a terminal; `headrace status` prints the same once")
    # Not across the screen, which says itself what is wrong.
    logging.getLogger("headrace").addHandler(logging.NullHandler())
    resolved = existing_run(settings.load(config, overrides or []), run_id)
    with open_run(resolved) as run, keyboard() as keys:
        Top(run, resolved.run.folder / "metrics.jsonl").run(Console(), keys)
