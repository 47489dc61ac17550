"""What a run ran with, written down at its start: `config.yaml` and `environment.json` in its folder.

`environment.json` is a list with an entry for every start of the learner that found something else than the one before:
since when, host, versions of Headrace and Python, code version, platform, GPUs, installed packages. Nothing of the
process's environment variables is in it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from common.config import Config

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
_GIT_S = 10.0


def record_config(config: Config) -> Path:
    """Write the resolved configuration into the run's folder, which is made; returns the file."""
    path = config.run.folder / CONFIG
    _write(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return path


def record(folder: Path, gpus: Sequence[str]) -> None:
    """Add the environment of this process to the run's `environment.json`, if it is not that of the last entry.

    Args:
        folder: the run's.
        gpus: names of the GPUs this process sees.
    """
    found = {"host": socket.gethostname(), **code(), "gpus": list(gpus), "packages": packages()}
    known = read(folder)
    if not known or {name: value for name, value in known[-1].items() if name != "since"} != found:
        entry = {"since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **found}
        _write(folder / ENVIRONMENT, json.dumps([*known, entry], indent=1) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run's `environment.json`, oldest first; empty where there is none that can be read."""
    try:
        entries = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


@cache
def code() -> dict[str, Any]:
    """Versions of Headrace and Python, platform, and, where Headrace runs from a checkout, its commit and whether
    tracked files were changed since (`dirty`); otherwise both are null."""
    commit, dirty = _checkout(Path(__file__))
    return {
        "headrace": metadata.version("headrace"),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def packages() -> dict[str, str]:
    """Name and version of every installed distribution, by name; of one that is there twice that which is imported."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        if name := each.metadata["Name"]:  # None: a broken installation left its folder
            found.setdefault(name, each.version)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _checkout(file: Path) -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the repository that tracks `file`. One that merely contains the file, as a virtual
    environment lies in somebody's project, says nothing about it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or one of another user's
        return None, None


def _write(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
