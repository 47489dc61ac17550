"""`headrace k8s render|secret`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from common.cli import ConfigPath
from k8s import chart

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run in a Kubernetes cluster.")

Namespace = Annotated[str, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Namespace of the objects.")]


@app.command()
def render(
    config: ConfigPath,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the release; by default the run's id.")
    ] = None,
    namespace: Namespace = "default",
    values: Annotated[
        list[Path] | None,
        typer.Option("--values", "-f", metavar="FILE", help="Values of the chart; several times, later ones win."),
    ] = None,
    values_only: Annotated[
        bool, typer.Option("--values-only", help="Print the values for helm instead of the manifests.")
    ] = False,
) -> None:
    """Print the manifests of a run, for `kubectl apply -f -`. Its YAML file goes into the cluster as it is."""
    found, resolved = chart.run_values(config, values or [])
    if values_only:
        typer.echo(yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True), nl=False)
        return
    typer.echo("---\n" + "---\n".join(chart.render(found, name or resolved.run.run_id, namespace)), nl=False)


@app.command()
def secret(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the Secret; the chart expects RELEASE-redis.")],
) -> None:
    """Print a Secret with new random passwords for a run's Valkey, for `kubectl apply -f -`. Keep no copy of it."""
    typer.echo(chart.secret(name), nl=False)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
