"""Curves of several runs in one picture or one page that needs nothing but itself (`headrace runs compare`)."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.errors import ConfigError
from common.runfolder import Record, Run, flat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Axis = Literal["step", "tokens", "wall"]
AXES: dict[Axis, str] = {"step": "step", "tokens": "response tokens trained on", "wall": "hours of training"}
METRICS = ("reward_mean", "sampled_accuracy", "response_length_mean", "entropy")
_IGNORED = ("run.id", "run.dir", "broker.", "metrics.")  # where a run lies and listens says nothing about it
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222;
background:#fff}}
svg{{max-width:100%;height:auto}} div{{overflow-x:auto}} table{{border-collapse:collapse}}
th,td{{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}} th:first-child{{text-align:left}}</style>
<h1>{title}</h1>
{figure}
{tables}
</html>
"""


def axis(records: Sequence[Record], name: Axis) -> list[float]:
    """Where a run's records lie on an axis: steps; response tokens trained on up to and with a step; hours of training,
    those before a resume included."""
    if name == "tokens":
        return list(itertools.accumulate(record.get("tokens", 0.0) for record in records))
    if name == "wall":
        return [record.get("time_s", 0.0) / 3600 for record in records]
    return [record["step"] for record in records]


def shown(runs: Sequence[Run], wanted: Sequence[str]) -> list[str]:
    """The metrics to draw: those wanted, else the usual ones that any of the runs has.

    Raises:
        ConfigError: no run has a metric, or none has any record.
    """
    known = {name for run in runs for record in run.records for name in record}
    if not known:
        raise ConfigError(f"{', '.join(run.id for run in runs)}: no record yet in metrics.jsonl; nothing to draw")
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--metric: no run has {name!r}; they have {', '.join(sorted(known - {'step'}))}")
    return list(dict.fromkeys(wanted)) or [name for name in METRICS if name in known]


def write(output: Path, runs: Sequence[Run], metrics: Sequence[str], axes: Sequence[Axis]) -> None:
    """Draw into `output`, whose end says as what: .png, or .html with the figures inside.

    Raises:
        ConfigError: another end, no matplotlib, or a place that cannot be written.
    """
    if output.suffix not in (".png", ".html"):
        raise ConfigError(f"--output: {str(output)!r} ends with {output.suffix!r}; use .png or .html")
    figure, buffer = draw(runs, metrics, axes), io.BytesIO()
    figure.savefig(buffer, format="png" if output.suffix == ".png" else "svg", dpi=120)
    data = buffer.getvalue()
    if output.suffix == ".html":
        data = page(runs, metrics, data.decode()).encode()
    try:
        output.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--output: {str(output)!r} cannot be written: {error.strerror}") from None


def draw(runs: Sequence[Run], metrics: Sequence[str], axes: Sequence[Axis]) -> Figure:
    """A row of panels per metric, a column per axis; a run has one colour in all of them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--output: drawing needs matplotlib; run: pip install 'headrace[report]'") from None

    figure = Figure(figsize=(1 + 4 * len(axes), 0.6 + 2.6 * len(metrics)), layout="constrained")
    panels = figure.subplots(len(metrics), len(axes), squeeze=False, sharey="row", sharex="col")
    for (row, metric), (column, name) in itertools.product(enumerate(metrics), enumerate(axes)):
        panel = panels[row][column]
        for number, run in enumerate(runs):
            points = [(x, r[metric]) for x, r in zip(axis(run.records, name), run.records, strict=True) if metric in r]
            style = ("-", "--", ":")[number // 10 % 3]
            panel.plot(*zip(*points, strict=True) if points else ([], []), style, color=f"C{number % 10}", label=run.id)
        panel.grid(alpha=0.3)
        if column == 0:
            panel.set_ylabel(metric)
        if row == len(metrics) - 1:
            panel.set_xlabel(AXES[name])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=max(1, min(len(runs), len(axes))))
    return figure


def page(runs: Sequence[Run], metrics: Sequence[str], svg: str) -> str:
    """The report as one HTML page: the figure, the last values, and where the runs' configurations differ."""
    ids = [run.id for run in runs]
    ends = [("steps", [str(run.steps) for run in runs])]
    ends += [(AXES[name], [f"{_last(axis(run.records, name)):.4g}" for run in runs]) for name in ("tokens", "wall")]
    ends += [
        (metric, [next((f"{r[metric]:.4g}" for r in reversed(run.records) if metric in r), "-") for run in runs])
        for metric in metrics
    ]
    tables = _table("At the end", ids, ends)
    differing = differences(runs)
    if differing:
        tables += _table("Where the configurations differ", ids, list(differing.items()))
    figure = svg[svg.index("<svg") :]
    return _PAGE.format(title=html.escape(f"Runs: {', '.join(ids)}"), figure=f"<div>{figure}</div>", tables=tables)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Fields whose values are not the same in all runs, each with the run's values in order."""
    configs = [flat(run.config) for run in runs]
    fields = dict.fromkeys(field for config in configs for field in config if not field.startswith(_IGNORED))
    values = {field: [str(config.get(field, "-")) for config in configs] for field in fields}
    return {field: each for field, each in values.items() if len(set(each)) > 1}


def _table(title: str, ids: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        first, *rest = (html.escape(cell) for cell in cells)
        return f"<tr><th>{first}</th>{''.join(f'<{kind}>{cell}</{kind}>' for cell in rest)}</tr>"

    body = "\n".join([line(["", *ids], "th"), *(line([name, *cells], "td") for name, cells in rows)])
    return f"<h2>{title}</h2>\n<div><table>\n{body}\n</table></div>\n"


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0
