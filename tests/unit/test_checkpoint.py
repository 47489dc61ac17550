"""Checkpoints: made current by one rename, newest complete one wins, leftovers of a crash do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError, FencedError
from learner import checkpoint
from learner.checkpoint import State


def write(root: Path, version: int, keep: int = 2, groups: tuple[str, ...] = ("a",), epoch: int = 0) -> Path:
    (checkpoint.prepare(root, version) / "weights").write_text(str(version))
    return checkpoint.commit(root, State(version, 1, groups, epoch), keep)


def test_commit_makes_the_checkpoint_current_with_its_state(tmp_path: Path) -> None:
    folder = write(tmp_path, 3, groups=("x", "y"))
    assert checkpoint.newest(tmp_path) == folder
    assert checkpoint.read_state(folder) == State(3, 1, ("x", "y"))
    assert (folder / "weights").read_text() == "3"


def test_commit_keeps_only_the_newest(tmp_path: Path) -> None:
    for version in (5, 10, 100):
        write(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


def test_newest_after_a_crash_while_writing_is_the_previous_one(tmp_path: Path) -> None:
    before = write(tmp_path, 1)
    checkpoint.prepare(tmp_path, 2)  # and the process died
    assert checkpoint.newest(tmp_path) == before
    write(tmp_path, 2)
    assert not list(tmp_path.glob("partial-*"))


def test_commit_of_a_version_reached_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 4, groups=("old",))
    assert checkpoint.read_state(write(tmp_path, 4, groups=("new",))).groups == ("new",)


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_read_state_damaged_names_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    (folder / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step-00000001: state\.json cannot be read"):
        checkpoint.read_state(folder)


def test_checkpoint_of_a_replaced_learner_is_older_whatever_its_version(tmp_path: Path) -> None:
    successor = write(tmp_path, 10, keep=1, epoch=2)
    write(tmp_path, 30, keep=1, epoch=1)
    assert checkpoint.newest(tmp_path) == successor
    with pytest.raises(FencedError, match="step-00000010 is a newer learner's"):
        write(tmp_path, 10, epoch=1)
    last = write(tmp_path, 11, keep=1, epoch=2)
    assert checkpoint.newest(tmp_path) == last


def test_require_newest_refuses_what_was_overtaken_while_it_loaded(tmp_path: Path) -> None:
    checkpoint.require_newest(tmp_path, None)
    restored = checkpoint.read_state(write(tmp_path, 3, epoch=1))
    checkpoint.require_newest(tmp_path, restored)
    write(tmp_path, 6, epoch=1)
    for state in (restored, None):
        with pytest.raises(FencedError, match="step-00000006 was written while"):
            checkpoint.require_newest(tmp_path, state)
