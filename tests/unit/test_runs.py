"""`headrace runs`: what run folders show, damage included, and curves of several runs in one file."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from common import environment
from common.cli_runs import app
from common.curves import axis, differences
from common.errors import ConfigError
from common.metrics import JsonlSink
from common.runfolder import Run, find, records


def make_run(folder: Path, run_id: str, steps: int, max_steps: int = 5, **learner: Any) -> Run:
    """The folder of a run that has done `steps`, each of 10 tokens and 60 s."""
    path = folder / run_id
    path.mkdir(parents=True)
    config = {
        "run": {"name": run_id.split("-")[0], "id": run_id, "dir": str(folder)},
        "model": {"path": "models/tiny"},
        "prompts": {"type": "dataset", "path": "train.jsonl"},
        "reward": {"type": "math_verify"},
        "learner": {"max_steps": max_steps, **learner},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    write(path, *(step(number) for number in range(1, steps + 1)))
    return Run(path)


def step(number: int, **values: float) -> dict[str, float]:
    return {"step": number, "reward_mean": number / 10, "tokens": 10.0, "time_s": 60.0 * number, **values}


def write(path: Path, *lines: dict[str, float]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, result.output


# --- records


def test_step_that_comes_again_takes_back_what_followed_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 5)
    write(run.folder, step(3, reward_mean=0.9))  # the learner resumed from step 2
    assert [(r["step"], r["reward_mean"]) for r in run.records] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert axis(run.records, "tokens") == [10.0, 20.0, 30.0]
    assert axis(run.records, "wall") == pytest.approx([1 / 60, 2 / 60, 3 / 60])


def test_torn_last_line_is_left_out_and_a_resumed_learner_writes_after_the_last_whole_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", 2)
    path = run.folder / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    assert [r["step"] for r in records(path)] == [1, 2]
    sink = JsonlSink(path)
    sink.write(3, {"reward_mean": 0.3})
    sink.close()
    assert [r["step"] for r in records(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ['{"step": 3, "rew{"step": 3}', "[]", '{"reward_mean": 1}', "", '{"step": "3"}'])
def test_damaged_line_is_named_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path, "a", 2)
    path = run.folder / "metrics.jsonl"
    with path.open("a") as file:
        file.write(line + "\n")
    write(run.folder, step(4))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}, line 3: "):
        records(path)


# --- states


def test_state_follows_from_steps_audit_and_age(tmp_path: Path) -> None:
    done, stopped, resumed = (make_run(tmp_path, name, steps) for name, steps in (("a", 5), ("b", 3), ("c", 3)))
    now = (stopped.folder / "metrics.jsonl").stat().st_mtime
    for run, offset in ((stopped, 5), (resumed, -5)):
        audit = run.folder / "audit.json"
        audit.write_text("{}")
        os.utime(audit, (now + offset, now + offset))
    assert done.state() == "complete"
    assert stopped.state() == "stopped"
    assert resumed.state(now + 10) == "active"
    assert resumed.state(now + 1000) == "silent"


# --- the commands


def test_list_has_a_line_per_run_and_names_what_is_damaged(tmp_path: Path) -> None:
    make_run(tmp_path, "good-1", 2)
    environment.record(tmp_path / "good-1", [])
    broken = make_run(tmp_path, "broken-1", 2)
    (broken.folder / "metrics.jsonl").write_text("nonsense\n")
    (tmp_path / "no-run").mkdir()
    code, output = invoke("list", tmp_path)
    assert code == 0
    lines = {line.split()[0]: line.split() for line in output.splitlines()[1:3]}
    started = environment.read(tmp_path / "good-1")[0]["since"]
    assert lines["good-1"] == ["good-1", "active", "2/5", "0.200", started, "0:02:00", "good"]
    assert lines["broken-1"][1] == "damaged"
    assert "metrics.jsonl, line 1" in output
    assert "no-run" not in output


def test_list_begins_with_the_run_that_was_written_to_last(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, run_id, 1) for run_id in ("a-1", "b-1")]
    for run, age_s in zip(runs, (10, 100), strict=True):
        for path in run.folder.rglob("*"):
            os.utime(path, (time.time() - age_s,) * 2)
    (runs[1].folder / "report.html").touch()  # by a command: its processes have written nothing
    assert [run.folder.name for run in find(tmp_path)] == ["a-1", "b-1"]


def test_list_of_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert invoke("list", tmp_path / "none") == (
        2,
        f"{tmp_path / 'none'}: no such folder; expected one that holds a folder per run",
    )


def test_show_has_changes_environment_metrics_checkpoints_and_warnings(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a-1", 2, groups_per_step=4)
    environment.record(run.folder, ["NVIDIA H200"])
    (run.folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run.folder / "logs").mkdir()
    line = "20:17:18 W run=a-1 learner-0 v=2 entropy is low"
    (run.folder / "logs" / "learner.log").write_text(f"{line.replace(' W ', ' I ')}\nTraceback\n{line}\n")
    code, output = invoke("show", "a-1", "--dir", tmp_path)
    assert code == 0
    sections = dict(re.findall(r"^(\w[^\n]*)\n((?:  [^\n]*\n)+)", output, re.MULTILINE))
    assert re.search(r"learner\.groups_per_step +4\n", sections["configuration, where it is not the default"])
    assert "learner.zero_stage" not in output
    assert "gpus       NVIDIA H200" in sections["environment, the last of 1"]
    assert "reward_mean  0.2\n" in sections["metrics of step 2"]
    assert sections["can be resumed from"] == "  checkpoints/step-00000002\n"
    assert sections["warnings and errors"] == f"  learner.log: {line}\n"


def test_show_of_an_older_configuration_shows_all_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a-1", 2, field_of_old=7)
    assert "learner.field_of_old  7\n" in invoke("show", run.folder)[1]


def test_run_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    make_run(tmp_path, "a-1", 2)
    code, output = invoke("show", "b-1", "--dir", tmp_path)
    assert code == 2
    assert "RUN: 'b-1'" in output and output.endswith("expected one of: a-1")


def test_compare_writes_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, "a-1", 5)
    make_run(tmp_path, "b-1", 3, groups_per_step=4)
    page = tmp_path / "report.html"
    assert invoke("compare", "a-1", "b-1", tmp_path / "a-1", "--dir", tmp_path, "--output", page)[0] == 0
    text = page.read_text()
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", text) == []
    assert len(re.findall(r"<g id=\"axes_\d+\">", text)) == 3  # one metric there is, over three axes
    assert "<th>steps</th><td>5</td><td>3</td>" in text
    assert "<th>response tokens trained on</th><td>50</td><td>30</td>" in text
    assert "<th>learner.groups_per_step</th><td>-</td><td>4</td>" in text


def test_compare_draws_the_curves_it_was_asked_for(tmp_path: Path) -> None:
    from common.curves import draw

    runs = [make_run(tmp_path, "a-1", 5), make_run(tmp_path, "b-1", 3)]
    figure = draw(runs, ["reward_mean"], ["step", "tokens"])
    lines = [[line.get_xydata().tolist() for line in panel.lines] for panel in figure.axes]
    assert lines[0][1] == [[1.0, 0.1], [2.0, 0.2], [3.0, 0.3]]
    assert [x for x, _ in lines[1][0]] == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_compare_escapes_what_stands_in_a_configuration(tmp_path: Path) -> None:
    make_run(tmp_path, "a-1", 2, note="<script>alert(1)</script>")
    make_run(tmp_path, "b-1", 2)
    page = tmp_path / "report.html"
    assert invoke("compare", "a-1", "b-1", "--dir", tmp_path, "--output", page)[0] == 0
    assert "<script>" not in page.read_text()


def test_compare_writes_a_png(tmp_path: Path) -> None:
    make_run(tmp_path, "a-1", 2)
    picture = tmp_path / "report.png"
    assert invoke("compare", "a-1", "--dir", tmp_path, "--x", "step", "--output", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--metric", "rewards"], "--metric: no run has 'rewards'; they have reward_mean, time_s, tokens"),
        (["--x", "day"], "--x: 'day' is no axis; use step, tokens or wall"),
        (["--output", "report.pdf"], "--output: 'report.pdf' ends with '.pdf'; use .png or .html"),
        (["--output", "/nowhere/report.png"], "--output: '/nowhere/report.png' cannot be written"),
    ],
)
def test_compare_refuses_what_it_cannot_do(tmp_path: Path, arguments: list[str], message: str) -> None:
    make_run(tmp_path, "a-1", 2)
    code, output = invoke("compare", "a-1", "--dir", tmp_path, *arguments)
    assert code == 2
    assert output.startswith(message)


def test_compare_of_runs_without_records_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "a-1", 0)
    assert invoke("compare", "a-1", "--dir", tmp_path)[1].startswith("a-1: no record yet in metrics.jsonl")


def test_compare_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, "a-1", 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, output = invoke("compare", "a-1", "--dir", tmp_path)
    assert code == 2
    assert "pip install 'headrace[report]'" in output


def test_differences_leave_out_where_a_run_lies(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "a-1", 1), make_run(tmp_path, "b-1", 1, max_steps=9)]
    assert differences(runs) == {"run.name": ["a", "b"], "learner.max_steps": ["5", "9"]}
