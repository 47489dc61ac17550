"""`headrace doctor`."""

from __future__ import annotations

import typer
from rich.console import Console

from common import settings
from common.cli import ConfigPath, Overrides

_STYLES = {"ok": "green", "warning": "yellow", "fault": "red"}


def doctor(config: ConfigPath, overrides: Overrides = None) -> None:
    """Look for whatever would keep a run from starting or surviving here, in a pod or on a laptop; exit with 1 at a
    fault."""
    from common.doctor import examine

    resolved = settings.load(config, overrides or [])
    console = Console(highlight=False, soft_wrap=True)
    faults = 0
    for finding in examine(resolved):
        line = f"{finding.status:7}  {finding.subject}: {finding.text}"
        console.print(line, style=_STYLES[finding.status], markup=False)
        faults += finding.status == "fault"
    console.print(f"{faults} faults" if faults else "no fault found", markup=False)
    raise typer.Exit(1 if faults else 0)
