"""`headrace checkpoint list|verify|export`: what a run can be resumed from, and a model to give away."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from broker.cli import RunId
from broker.runs import existing_run
from common import settings
from common.cli import Overrides
from common.errors import ConfigError
from learner import checkpoint

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Look at a run's checkpoints and snapshots, or export a model."
)

Where = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A run's YAML file or folder, a folder that holds checkpoints, or one checkpoint."
    ),
]
_UNREADABLE = (-1, -1)
Json = Annotated[bool, typer.Option("--json", help="One JSON array instead of text.")]


@app.command("list")
def list_(path: Where, as_json: Json = False, run_id: RunId = None, overrides: Overrides = None) -> None:
    """One line per checkpoint and snapshot, the newest first: `--resume` takes the first one that is whole."""
    folders = find(path, run_id, overrides)
    readable = sorted((each for each in folders if _age(each) != _UNREADABLE), key=_age, reverse=True)
    rows = [_row(each) for each in readable]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _table(rows)
    for each in folders:
        if each not in readable:
            typer.echo(f"{each} is broken: {checkpoint.broken(each)}", err=True)


@app.command()
def verify(path: Where, as_json: Json = False, run_id: RunId = None, overrides: Overrides = None) -> None:
    """Read every byte and compare it with what was written; exit with 1 where something is broken."""
    found = {str(each): checkpoint.broken(each) for each in find(path, run_id, overrides)}
    if as_json:
        typer.echo(json.dumps([{"path": name, "broken": problem or None} for name, problem in found.items()], indent=2))
    else:
        for name, problem in found.items():
            typer.echo(f"{name}: {'broken: ' + problem if problem else 'whole'}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command()
def export(
    path: Where,
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB.")] = "5GB",
    to_hub: Annotated[str | None, typer.Option(metavar="NAME", help="Upload it under this name, too.")] = None,
    base: Annotated[
        str | None, typer.Option(help="Model that an adapter is merged into; default: where it was in training.")
    ] = None,
    run_id: RunId = None,
    overrides: Overrides = None,
) -> None:
    """Write the model of the newest whole checkpoint in Hugging Face format: safetensors, config, tokenizer."""
    from learner.export import export as write

    newest_first = sorted(find(path, run_id, overrides), key=_age, reverse=True)
    folder = next((each for each in newest_first if not checkpoint.broken(each)), None)
    if folder is None:
        raise ConfigError(f"{path}: no whole checkpoint; `headrace checkpoint verify {path}` says what is wrong")
    write(folder, out, dtype, max_shard_size, to_hub, base)
    typer.echo(f"{folder} -> {out}, {dtype}")


def find(path: Path, run_id: str | None, overrides: list[str] | None) -> list[Path]:
    """The checkpoints, whole or broken, that `path` means.

    Raises:
        ConfigError: none, or the path is nothing of that kind.
    """
    if path.suffix in (".yaml", ".yml"):
        roots = list(existing_run(settings.load(path, overrides or []), run_id).save_folders)
    elif (path / checkpoint.STATE).exists():
        return [path]
    else:
        roots = [path, path / "checkpoints", path / "snapshots"]
        if (path / "config.yaml").is_file():
            config = settings.load(path / "config.yaml", environ={})
            roots += [config.save_folders[1]] if config.learner.snapshot_folder is not None else []
    folders = checkpoint.everything(*roots)
    if not folders:
        raise ConfigError(f"{path}: no checkpoint under {' or '.join(str(root) for root in roots)}")
    return folders


def _age(folder: Path) -> tuple[int, int]:
    """Epoch and version; of one that cannot be read less than any."""
    try:
        state = checkpoint.read_state(folder)
    except ConfigError:
        return _UNREADABLE
    return state.epoch, state.version


def _row(folder: Path) -> dict[str, object]:
    state, files = checkpoint.read_state(folder), checkpoint.files(folder)
    return {
        "path": str(folder),
        "version": state.version,
        "epoch": state.epoch,
        "ranks": state.ranks,
        "unsettled": len(state.groups),
        "megabytes": round(sum(each.size for each in files.values()) / 1e6, 1),
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / checkpoint.STATE).stat().st_mtime)),
    }


def _table(rows: list[dict[str, object]]) -> None:
    names = ("version", "epoch", "ranks", "unsettled", "megabytes", "written", "path")
    lines = [[name.upper() for name in names], *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
