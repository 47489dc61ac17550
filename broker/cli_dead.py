"""`headrace dead list|show|retry|drop`: what was given up, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from broker.cli import RunId
from broker.records import DeadLetter
from broker.store import Broker
from common import settings
from common.cli import ConfigPath, Overrides
from common.errors import HeadraceError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Look at a run's dead letters, put them back, or forget them."
)

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="Group ids, or entry ids as `show` prints them.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON array instead of text.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@app.command("list")
def list_(
    config: ConfigPath, ids: Ids = None, as_json: Json = False, run_id: RunId = None, overrides: Overrides = None
) -> None:
    """One line per dead letter, the newest first."""
    with _open(config, run_id, overrides) as run:
        letters, _ = _find(run, ids)
    if as_json:
        typer.echo(json.dumps([_summary(each) for each in letters], indent=2))
        return
    rows = [("ID", "KIND", "ATTEMPTS", "AGE", "GENERATOR", "ERROR")]
    for each in letters:
        attempts = str(each.attempts or "-")
        rows.append((each.id, each.kind, attempts, _age(each.age_s), each.generator or "-", _one_line(each.error)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]))


@app.command()
def show(
    config: ConfigPath, ids: Ids = None, as_json: Json = False, run_id: RunId = None, overrides: Overrides = None
) -> None:
    """Dead letters in full: error, prompt text, columns. Without ids all of them; exit with 1 where one is missing."""
    with _open(config, run_id, overrides) as run:
        letters, missing = _find(run, ids)
    if as_json:
        typer.echo(json.dumps([_whole(each) for each in letters], indent=2, default=str))
    else:
        typer.echo("\n\n".join(_page(each) for each in letters))
    _say_missing(missing)
    raise typer.Exit(1 if missing else 0)


@app.command()
def retry(
    config: ConfigPath, ids: Ids = None, all_: All = False, run_id: RunId = None, overrides: Overrides = None
) -> None:
    """Put prompts back for sampling, with all their attempts; the ledger counts them as outstanding again."""
    _end(config, run_id, overrides, _chosen(ids, all_), "put back for sampling", Broker.retry_dead)


@app.command()
def drop(
    config: ConfigPath, ids: Ids = None, all_: All = False, run_id: RunId = None, overrides: Overrides = None
) -> None:
    """Forget dead letters: what they held is gone, the ledger goes on counting them as dead."""
    _end(config, run_id, overrides, _chosen(ids, all_), "dropped; it stays counted as dead", Broker.drop_dead)


def _end(
    config: Path,
    run_id: str | None,
    overrides: list[str] | None,
    ids: list[str] | None,
    done: str,
    act: Callable[[Broker, DeadLetter], bool],
) -> None:
    """Do it to each of them. What is not there any more needs nothing; what cannot be done ends the command with 1."""
    failed = False
    with _open(config, run_id, overrides) as run:
        letters, missing = _find(run, ids)
        for each in letters:
            try:
                if act(run, each):
                    typer.echo(f"{each.id}: {done}")
                else:
                    missing.append(each.id)
            except HeadraceError as error:
                failed = True
                typer.echo(str(error), err=True)
    _say_missing(missing)
    raise typer.Exit(1 if failed else 0)


@contextmanager
def _open(config: Path, run_id: str | None, overrides: list[str] | None) -> Iterator[Broker]:
    from broker.audit import open_run
    from broker.runs import existing_run

    with open_run(existing_run(settings.load(config, overrides or []), run_id)) as run:
        yield run


def _chosen(ids: list[str] | None, all_: bool) -> list[str] | None:
    if bool(ids) == all_:
        raise typer.BadParameter("name dead letters by their ids, or give --all; one of the two")
    return ids or None


def _find(run: Broker, ids: list[str] | None) -> tuple[list[DeadLetter], list[str]]:
    """The dead letters of these ids (None: all), newest first; and the ids that none has."""
    letters = run.dead_letters(limit=None)
    if not ids:
        return letters, []
    wanted = set(ids)
    found = [each for each in letters if wanted & {each.group_id, each.entry_id}]
    known = {name for each in found for name in (each.group_id, each.entry_id)}
    return found, [each for each in ids if each not in known]


def _say_missing(ids: list[str]) -> None:
    for each in ids:
        typer.echo(f"{each}: no such dead letter (any more)", err=True)


def _summary(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "entry": letter.entry_id,
        "kind": letter.kind,
        "error": letter.error,
        "attempts": letter.attempts,
        "age_s": letter.age_s,
        "generator": letter.generator,
    }


def _whole(letter: DeadLetter) -> dict[str, Any]:
    prompt = letter.prompt
    shown = None
    if prompt is not None:
        shown = {
            "text": prompt.text,
            "columns": prompt.columns,
            "tokens": len(prompt.token_ids),
            "released_version": prompt.released_version,
        }
    return {**_summary(letter), "prompt": shown}


def _page(letter: DeadLetter) -> str:
    lines = [
        f"{letter.id} ({letter.kind}), entry {letter.entry_id}",
        f"attempts   {letter.attempts or 'unknown'}",
        f"age        {_age(letter.age_s)}",
        f"generator  {letter.generator or 'unknown'}",
        f"error      {letter.error}",
    ]
    if letter.prompt is None:
        return "\n".join([*lines, "prompt     cannot be read"])
    columns = json.dumps(letter.prompt.columns, indent=2, default=str, ensure_ascii=False)
    size = f"{len(letter.prompt.token_ids)} tokens, released at version {letter.prompt.released_version}"
    return "\n".join([*lines, f"prompt     {size}", letter.prompt.text, f"columns    {columns}"])


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
