"""Checkpoints: made current by one rename, newest whole one wins, leftovers of a crash do no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError, FencedError
from learner import checkpoint
from learner.checkpoint import Folder, State


def write(root: Path, version: int, keep: int = 2, groups: tuple[str, ...] = ("a",), epoch: int = 0) -> Path:
    state = State(version, 1, groups, epoch, steps={"policy": version})
    return checkpoint.save(root, state, lambda folder: folder.write("model/weights", [str(version).encode()]), keep)


def test_save_makes_the_checkpoint_current_with_its_state(tmp_path: Path) -> None:
    folder = write(tmp_path, 3, groups=("x", "y"))
    assert checkpoint.newest(tmp_path) == folder
    assert checkpoint.read_state(folder) == State(3, 1, ("x", "y"), steps={"policy": 3})
    assert (folder / "model" / "weights").read_text() == "3"
    assert checkpoint.broken(folder) == ""


def test_save_keeps_only_the_newest(tmp_path: Path) -> None:
    for version in (5, 10, 100):
        write(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


def test_save_of_a_version_reached_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 4, groups=("old",), epoch=1)
    assert checkpoint.read_state(write(tmp_path, 4, groups=("new",), epoch=2)).groups == ("new",)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_save_leaves_a_newer_learners_unfinished_work_alone(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "partial-00000002.5", tmp_path / "partial-00000002.3"
    theirs.mkdir()
    ours.mkdir()
    write(tmp_path, 2, epoch=4)
    assert theirs.exists() and not ours.exists()


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nowhere") is None


def test_newest_looks_at_all_folders(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints", 10)
    snapshot = write(tmp_path / "snapshots", 12)
    assert checkpoint.newest(tmp_path / "checkpoints", tmp_path / "snapshots") == snapshot


def test_checkpoint_of_a_replaced_learner_is_older_whatever_its_version(tmp_path: Path) -> None:
    successor = write(tmp_path, 10, keep=1, epoch=2)
    write(tmp_path, 30, keep=1, epoch=1)
    assert checkpoint.newest(tmp_path) == successor
    with pytest.raises(FencedError, match="step-00000010 is a newer learner's"):
        write(tmp_path, 10, epoch=1)
    last = write(tmp_path, 11, keep=1, epoch=2)
    assert checkpoint.newest(tmp_path) == last


def test_require_newest_refuses_what_was_overtaken_while_it_loaded(tmp_path: Path) -> None:
    checkpoint.require_newest(None, tmp_path)
    restored = checkpoint.read_state(write(tmp_path, 3, epoch=1))
    checkpoint.require_newest(restored, tmp_path)
    folder = write(tmp_path, 6, epoch=1)
    for state in (restored, None):
        with pytest.raises(FencedError, match="step-00000006 was written while"):
            checkpoint.require_newest(state, tmp_path)
    (folder / "model" / "weights").unlink()  # nobody can resume from it
    checkpoint.require_newest(restored, tmp_path)


def test_save_fenced_at_the_last_moment_leaves_nothing(tmp_path: Path) -> None:
    before = write(tmp_path, 1)

    def fenced() -> None:
        raise FencedError("replaced")

    with pytest.raises(FencedError):
        checkpoint.save(tmp_path, State(2, 1, ()), lambda folder: folder.write("a", [b"a"]), 2, fenced)
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"version": 1}'])
def test_read_state_damaged_names_the_file(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, 1)
    (folder / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"step-00000001: state\.json cannot be read"):
        checkpoint.read_state(folder)
    assert checkpoint.broken(folder).startswith("state.json cannot be read")


def test_write_refuses_a_second_file_of_the_same_name(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a", [b"1"])
    with pytest.raises(FileExistsError):
        folder.write("a", [b"2"])
