"""Bad input stops `headrace up` at once, before anything starts, with one clear line."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import cli


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path, *sets: str) -> str:
    """The error of `headrace up` on the tiny example with these settings."""
    arguments = [f"--set={item}" for item in (f"run.dir={runs}", *sets)]
    monkeypatch.setattr(sys, "argv", ["headrace", "up", "examples/tiny.yaml", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert not runs.exists(), "nothing may be started or left behind"
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["learner.group_per_step=4"], ["learner.group_per_step", "unknown key"]),
        (["model.path=/nowhere/model"], ["model.path", "/nowhere/model"]),
        (["reward.function=examples.no_such:thing"], ["reward.function", "examples.no_such"]),
        (["broker.url=redis://127.0.0.1:1"], ["redis://127.0.0.1:1"]),
        (["learner.micro_batch_tokens=100"], ["learner.micro_batch_tokens", "100", "160"]),
        (["learner.max_steps=-1"], ["learner.max_steps", "-1"]),
        (["prompts.task=chain_sums"], ["prompts.task", "chain_sums", "chain_sum"]),
    ],
    ids=["unknown-key", "model-folder", "reward-import", "no-redis", "token-budget", "negative", "task"],
)
def test_up_with_bad_setting_names_field_and_value(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model: Path,
    settings: list[str],
    expected: list[str],
) -> None:
    line = refuse(monkeypatch, capsys, tmp_path / "runs", f"model.path={tiny_model}", *settings)
    assert all(part in line for part in expected), line


def test_up_with_port_in_use_names_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model: Path,
    busy_port: int,
) -> None:
    sets = (f"model.path={tiny_model}", f"broker.port={busy_port}")
    line = refuse(monkeypatch, capsys, tmp_path / "runs", *sets)
    assert "broker.port" in line and str(busy_port) in line


def test_up_with_missing_column_lists_those_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1", "answer": "2"}\n')
    prompts = f"prompts={{type: dataset, path: {data}}}"
    line = refuse(monkeypatch, capsys, tmp_path / "runs", f"model.path={tiny_model}", prompts)
    assert "prompt" in line and "question" in line
