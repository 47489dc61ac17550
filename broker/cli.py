"""`headrace broker [acl]|up|status|audit`; `headrace dead` is in `broker.cli_dead`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from common import settings
from common.cli import ConfigPath, Overrides, load_config
from common.config import Config
from common.errors import ConfigError

RunId = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Id of the run; by default the newest one.")]


class _ServeByDefault(typer.core.TyperGroup):
    """`headrace broker CONFIG` is `headrace broker serve CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


broker = typer.Typer(cls=_ServeByDefault, add_completion=False, help="Run the broker service (the default), or acl.")


@broker.command()
def serve(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run the broker service: prompt feeder and lease reclaimer."""
    from broker.service import run_service

    raise typer.Exit(run_service(load_config(config, overrides)))


@broker.command()
def acl(
    config: ConfigPath,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Id of the run, or a pattern such as 'gsm8k-*'.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print ACL SETUSER lines for a user per role, each with the least rights, for a server of your own."""
    from broker.acl import lines

    resolved = settings.load(config, overrides or [])
    for line in lines(run_id or resolved.run.run_id, resolved.broker.cluster):
        typer.echo(line)


def status(config: ConfigPath, run_id: RunId = None, overrides: Overrides = None) -> None:
    """Print a run's queues, policy version, ledger and members."""
    from broker.audit import open_run, overview
    from broker.runs import existing_run

    resolved = existing_run(settings.load(config, overrides or []), run_id)
    with open_run(resolved) as run:
        typer.echo(
            overview(
                resolved.run.run_id,
                run.version(),
                run.queues(),
                run.ledger(),
                run.members(),
                run.dead_letters(),
                run.evaluation(),
            )
        )


def audit(
    config: ConfigPath,
    run_id: RunId = None,
    watching: Annotated[bool, typer.Option("--watch", help="Print it anew every second until Ctrl-C.")] = False,
    overrides: Overrides = None,
) -> None:
    """Print a run's conservation equation and its oldest groups, live or finished; exit with 1 where the equation does
    not hold (with --watch: did not hold the last time)."""
    from broker.audit import open_run, report, watch
    from broker.runs import existing_run

    resolved = existing_run(settings.load(config, overrides or []), run_id)
    with open_run(resolved) as run:
        if watching:
            balanced = watch(run, Console(), lambda: time.sleep(1.0))
        else:
            text, balanced = report(run)
            typer.echo(text)
    raise typer.Exit(0 if balanced else 1)


def up(
    config: ConfigPath,
    generators: Annotated[int, typer.Option("--generators", min=1, metavar="N", help="Generator processes.")] = 1,
    learner_ranks: Annotated[
        int | None,
        typer.Option("--learner-ranks", min=1, metavar="M", help="Overrides learner.ranks; if elastic: as resize."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, metavar="K", help="Overrides learner.max_steps.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run from its newest checkpoint.")] = False,
    run_id: RunId = None,
    overrides: Overrides = None,
) -> None:
    """Start a whole local fleet: server, broker service, generators, learner."""
    from broker.local import run_fleet

    loaded = settings.load(config, overrides or [])
    extra = [f"run.id={json.dumps(_run_of_up(loaded, run_id, resume))}"]  # quoted: an id may look like a number
    if learner_ranks is not None and loaded.learner.elastic is None:
        extra.append(f"learner.ranks={learner_ranks}")
    if max_steps is not None:
        extra.append(f"learner.max_steps={max_steps}")
    resolved = load_config(config, overrides, extra)
    raise typer.Exit(run_fleet(resolved, generators, learner_ranks, resume))


def _run_of_up(config: Config, run_id: str | None, resume: bool) -> str:
    """Id of the run to start or continue.

    Raises:
        ConfigError: a new run whose folder exists, or nothing to resume.
    """
    from broker.runs import new_run_id, newest_run_id

    chosen = run_id or config.run.id or (newest_run_id(config.run) if resume else new_run_id(config.run.name))
    if chosen is None:
        raise ConfigError(f"{config.run.dir}: no run named {config.run.name!r} to resume; start it without --resume")
    folder = config.run.dir / chosen
    if resume and not folder.is_dir():
        raise ConfigError(f"{folder}: no such run to resume; start it without --resume")
    if not resume and folder.exists():
        raise ConfigError(f"{folder}: this run exists; continue it with --resume, or choose another --run-id")
    return chosen
