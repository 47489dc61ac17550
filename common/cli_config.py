"""`headrace config check|show|schema`."""

from __future__ import annotations

import json

import typer
import yaml

from common import settings
from common.cli import ConfigPath, Overrides, load_config
from common.config import Config

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Check or show a run's configuration.")


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Say whether a run could start: the schema, then what it points to (model, data, reward, Redis)."""
    resolved = load_config(config, overrides)
    typer.echo(f"{config}: ok (run {resolved.run.run_id})")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved configuration as YAML."""
    resolved = settings.load(config, overrides or [])
    typer.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))
