"""Kill during saving at random bytes, fill the disk, forbid writing, flip and truncate: always a usable one is left."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learner import checkpoint
from learner.checkpoint import Folder, State

POSITIONS = 50
_OPERATION = 200  # units that an operation on the file system counts, beside a unit per byte


def fill(folder: Folder) -> None:
    rng = random.Random(folder.path.name)
    for name, size in (("model/config.json", 300), ("model/model.safetensors", 20_000), ("rng.safetensors", 3000)):
        folder.write(name, [rng.randbytes(size // 4) for _ in range(4)])


def save(root: Path, version: int, epoch: int = 1) -> None:
    checkpoint.save(root, State(version, 2, ("a", "b"), epoch), fill, keep=2)


class Meter:
    """Counts what a save does to the file system, and kills the process when `limit` is reached."""

    def __init__(self, limit: float) -> None:
        self.units, self._limit = 0, limit
        for module, name in ((os, "fsync"), (os, "rmdir"), (os, "unlink"), (Path, "rename"), (Path, "mkdir")):
            setattr(module, name, self._counted(getattr(module, name)))
        Path.open = self._opened(Path.open)  # type: ignore[method-assign]

    def spend(self, units: int) -> None:
        self.units += units
        if self.units >= self._limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.spend(_OPERATION)
            result = function(*args, **options)
            self.spend(_OPERATION)
            return result

        return call

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = function(path, mode, *args, **options)
            if "b" not in mode or "r" in mode:
                return file
            write = file.write

            class Metered:
                def __enter__(metered) -> Metered:
                    return metered

                def __exit__(metered, *_: object) -> None:
                    file.close()

                def write(metered, data: bytes) -> int:
                    left = max(0, int(min(self._limit, 1 << 40) - self.units))
                    if left < len(data):
                        write(data[:left])
                        file.flush()
                    self.spend(len(data))
                    return int(write(data))

                def __getattr__(metered, name: str) -> Any:
                    return getattr(file, name)

            return Metered()

        return call


def in_child(work: Callable[[], None]) -> int:
    """`work` in a process of its own; its exit code, negative for a signal, 3 for an OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 4
    try:
        work()
        code = 0
    except OSError:
        code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def whole(root: Path) -> list[int]:
    """Versions that can be used, the newest first; nothing else may look as if it could."""
    folders = checkpoint.by_age(root)
    assert all(not checkpoint.broken(folder) for folder in folders)
    assert set(folders) == set(checkpoint.everything(root))
    return [checkpoint.read_state(folder).version for folder in reversed(folders)]


@pytest.mark.parametrize("again", [False, True], ids=["new version", "version reached again"])
def test_killed_at_any_byte_of_a_save_the_one_before_it_is_left(tmp_path: Path, again: bool) -> None:
    """With `again` there is a checkpoint of the same version in the way; with a leftover of an earlier crash, too."""
    prepared = tmp_path / "prepared"
    for version in (1, 2, *((3,) if again else ())):
        save(prepared, version)
    (prepared / "partial-00000003.1").mkdir()
    (prepared / "partial-00000003.1" / "half").write_bytes(b"half")

    def units() -> int:
        reading, writing = os.pipe()

        def dry() -> None:
            meter = Meter(float("inf"))
            save(shutil.copytree(prepared, tmp_path / "dry"), 3, epoch=2)
            os.write(writing, str(meter.units).encode())

        assert in_child(dry) == 0
        return int(os.read(reading, 32))

    total, rng, outcomes = units(), random.Random(5), set()
    assert total > 23_000
    for number in range(POSITIONS):
        root, limit = shutil.copytree(prepared, tmp_path / str(number)), rng.randrange(1, total)

        def killed(root: Path = root, limit: int = limit) -> None:
            Meter(limit)
            save(root, 3, epoch=2)

        assert in_child(killed) == -signal.SIGKILL, limit
        versions = whole(root)
        assert versions[0] in ((3,) if again else (2, 3)), (limit, versions)
        outcomes.add(checkpoint.read_state(checkpoint.by_age(root)[-1]).epoch)
        save(root, 4, epoch=3)  # and saving goes on
        assert whole(root)[0] == 4
        assert not list(root.glob("partial-*"))
    assert outcomes == {1, 2}, "some were killed before the rename and some after it"


@pytest.mark.parametrize("trouble", ["disk full", "read-only"])
def test_save_that_cannot_write_raises_and_leaves_the_one_before_it(tmp_path: Path, trouble: str) -> None:
    save(tmp_path, 1)
    tmp_path.chmod(0o755)
    rng = random.Random(7)
    for _ in range(5):

        def work() -> None:
            if trouble == "disk full":  # a limit on a file's size fails like a full disk, in the middle of a write
                resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(1, 15_000),) * 2)
            elif os.geteuid() == 0:
                os.setuid(65534)
            else:
                tmp_path.chmod(0o555)
            save(tmp_path, 2)

        assert in_child(work) == 3
        tmp_path.chmod(0o755)
        assert whole(tmp_path) == [1]
    save(tmp_path, 2)
    assert whole(tmp_path) == [2, 1]


def test_every_flipped_byte_and_truncation_is_found_and_the_file_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = checkpoint.folder_for(tmp_path, 1)
    names = [*checkpoint.files(folder), checkpoint.STATE]
    rng = random.Random(3)
    for number in range(POSITIONS):
        path = folder / names[number % len(names)]
        data = path.read_bytes()
        at = rng.randrange(len(data))
        flipped = bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        path.write_bytes(data[:at] + (flipped if number % 2 else b""))
        problem = checkpoint.broken(folder)
        assert problem.startswith(str(path.relative_to(folder))), (path, at, problem)
        path.write_bytes(data)
    (folder / names[0]).unlink()
    assert "cannot be read" in checkpoint.broken(folder)
