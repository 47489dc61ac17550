"""`headrace resize learner`: another number of ranks, while the run goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.cli import RunId
from common import settings
from common.cli import ConfigPath, Overrides

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Change the size of a part of a running fleet.")


@app.callback()
def _root() -> None:
    """Change the size of a part of a running fleet."""


@app.command()
def learner(
    config: ConfigPath,
    ranks: Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Ranks of the whole learner.")],
    run_id: RunId = None,
    overrides: Overrides = None,
) -> None:
    """Wish for a learner of N ranks. `headrace up` starts and dismisses nodes accordingly; who starts nodes otherwise
    (Kubernetes: the StatefulSet's replicas) is to do the same. No step is lost."""
    from broker.audit import open_run
    from broker.elastic import nodes_for
    from broker.runs import existing_run

    resolved = existing_run(settings.load(config, overrides or []), run_id)
    nodes = nodes_for(resolved, ranks)
    with open_run(resolved) as run:
        before = run.wished_ranks()
        run.resize(ranks)
    was = "" if before is None else f" (was {before})"
    typer.echo(f"run {resolved.run.run_id}: the learner is to have {ranks} ranks{was}, on {nodes} nodes")
