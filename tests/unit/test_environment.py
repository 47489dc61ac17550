"""What a run ran with is written down, and nothing secret with it."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from common import environment, settings
from common.config import Config


def test_environment_of_a_start_has_versions_and_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    environment.record(tmp_path, ["NVIDIA H200"])
    (entry,) = environment.read(tmp_path)
    assert entry["packages"]["numpy"] == metadata.version("numpy")
    assert entry["gpus"] == ["NVIDIA H200"]
    assert entry["python"].startswith("3.")
    assert "0123456789abcdef" not in (tmp_path / environment.ENVIRONMENT).read_text()


def test_second_start_is_an_entry_only_where_something_changed(tmp_path: Path) -> None:
    for gpus in ([], [], ["NVIDIA H200"]):
        environment.record(tmp_path, gpus)
    assert [entry["gpus"] for entry in environment.read(tmp_path)] == [[], ["NVIDIA H200"]]


def test_environment_file_that_is_damaged_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / environment.ENVIRONMENT).write_text('[{"since"')
    environment.record(tmp_path, [])
    assert len(json.loads((tmp_path / environment.ENVIRONMENT).read_text())) == 1


def test_commit_is_that_of_the_repository_which_tracks_the_file(tmp_path: Path) -> None:
    tracked, ignored = tmp_path / "tracked.py", tmp_path / "venv" / "ignored.py"
    ignored.parent.mkdir()
    tracked.write_text("one")
    ignored.write_text("one")

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True).stdout

    git("init")
    git("add", "tracked.py")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert environment._checkout(tracked) == (commit, False)
    assert environment._checkout(ignored) == (None, None)
    tracked.write_text("two")
    assert environment._checkout(tracked) == (commit, True)


def test_recorded_configuration_resolves_to_the_same(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "test", "dir": tmp_path},
            "model": {"path": "models/tiny"},
            "prompts": {"type": "dataset", "path": "train.jsonl"},
            "reward": {"type": "math_verify"},
        }
    )
    path = environment.record_config(config)
    assert path == tmp_path / "test" / "config.yaml"
    assert settings.resolve(yaml.safe_load(path.read_text()), str(path), environ={}) == config
