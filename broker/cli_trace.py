"""`headrace trace`: the life of one prompt as a timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from broker.cli import RunId
from broker.tracing import Event
from common import settings
from common.cli import ConfigPath, Overrides
from common.errors import ConfigError


def trace(
    config: ConfigPath,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Id of the group, as in logs and dead letters.")],
    run_id: RunId = None,
    overrides: Overrides = None,
) -> None:
    """Print what happened to one prompt, when, and who did it; it must be among those that `tracing.sample` chose."""
    from broker.audit import open_run
    from broker.runs import existing_run

    resolved = existing_run(settings.load(config, overrides or []), run_id)
    with open_run(resolved) as run:
        life = run.life(group)
        if not life:
            kept = sorted({event.group_id for event in run.trace()} - {""})
            raise ConfigError(f"GROUP: {group!r} is not among the traced ones; {_others(kept)}")
    typer.echo("\n".join([f"group {group} of run {resolved.run.run_id}", *timeline(life)]))


def timeline(life: Sequence[Event]) -> list[str]:
    """A line per event: UTC time, seconds since the first, seconds since the one before, what, who, and more."""
    lines = [f"{'time':<12} {'since start':>12} {'since last':>11}  event"]
    for before, event in zip([life[0], *life], life, strict=False):
        clock = time.strftime("%H:%M:%S", time.gmtime(event.at_ms // 1000)) + f".{event.at_ms % 1000:03}"
        version = "" if event.version is None else f"version {event.version}"
        words = " ".join(filter(None, (f"{event.name:<10}", event.member, version, event.detail)))
        since = [(event.at_ms - each.at_ms) / 1000 for each in (life[0], before)]
        lines.append(f"{clock} {since[0]:>10.3f} s {since[1]:>9.3f} s  {words.rstrip()}")
    return lines


def _others(kept: Sequence[str]) -> str:
    if not kept:
        return "there are none: set tracing.sample before the run starts"
    return f"those that are kept: {', '.join(kept[:10])}{f' and {len(kept) - 10} more' if len(kept) > 10 else ''}"
