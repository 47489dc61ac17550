"""The `headrace` command. Each room registers its sub-commands in the entry-point group `headrace.commands`."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common import settings
from common.config import Config
from common.errors import HeadraceError

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE|FILE.yaml",
        help="Override one field, or lay a YAML file's sections over it; may be given several times, later ones win.",
    ),
]


def load_config(path: Path, overrides: list[str] | None, extra: list[str] | None = None) -> Config:
    """The resolved configuration after every room's start-up checks."""
    config = settings.load(path, [*(overrides or []), *(extra or [])])
    settings.check(config)
    return config


class _Lazy(typer.core.TyperGroup):
    """Loads a sub-command's module only when it is asked for: `headrace config` must not import torch."""

    def list_commands(self, ctx: object) -> list[str]:
        return sorted(point.name for point in entry_points(group="headrace.commands"))

    def get_command(self, ctx: object, cmd_name: str) -> typer.core.TyperCommand | typer.core.TyperGroup | None:  # type: ignore[override]
        for point in entry_points(group="headrace.commands", name=cmd_name):
            target = point.load()
            if isinstance(target, typer.Typer):
                return typer.main.get_command(target)  # type: ignore[return-value]
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(target)
            return typer.main.get_command(single)  # type: ignore[return-value]
        return None


app = typer.Typer(
    cls=_Lazy, add_completion=False, no_args_is_help=True, help="Headrace: streaming RL for language models."
)


@app.callback()
def _root() -> None:
    """Headrace: an asynchronous, off-policy, streaming RL trainer for language models."""


def main() -> None:
    try:
        app(prog_name="headrace")
    except HeadraceError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        for line in str(error).splitlines():
            console.print(f"error: {line}", markup=False, style="red")
        sys.exit(2)
