"""The Dockerfiles without an engine: reading them, and running the build stage of one in an ordinary folder.

    python -m tests.k8s.dockerfiles k8s/images/Dockerfile.cpu FOLDER

copies what the stage copies (as .dockerignore lets it) to FOLDER/src, and runs what it runs there, FOLDER/opt
being /opt. So the environment of the image is made by the image's own steps, from nothing but its own context.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    stage: int  # -1: before the first FROM
    name: str
    text: str


def read(path: Path) -> list[Instruction]:
    """The instructions, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stage, found = -1, []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, text.strip()))
    return found


def context(path: str) -> Iterator[Path]:
    """Files at `path` that .dockerignore lets into the context; as in Docker, the last rule that fits decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    start = ROOT / path
    if start.is_file():
        yield from () if _ignored(Path(path), rules) else (start,)
        return
    for entry in sorted(start.iterdir()):
        name = entry.relative_to(ROOT)
        inside = any(rule.startswith(f"!{name}/") for rule in rules)
        if not _ignored(name, rules) or inside:
            yield from context(str(name))


def _ignored(file: Path, rules: list[str]) -> bool:
    names = [str(file), *map(str, list(file.parents)[:-1])]  # a rule for a folder is one for what is in it
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        patterns = [pattern, pattern.removeprefix("**/")]
        tails = [part for name in names for part in (name, name.rsplit("/", 1)[-1])] if "**/" in pattern else names
        if any(fnmatch.fnmatchcase(name, each) for name in tails for each in patterns):
            ignored = not rule.startswith("!")
    return ignored


def build(path: Path, folder: Path) -> None:
    """Run the first stage of `path` in `folder`."""
    source, environ = folder / "src", {**os.environ, "PYTHON": sys.executable}
    source.mkdir(parents=True)
    for step in (step for step in read(path) if step.stage == 0):
        if step.name == "COPY":
            *sources, target = step.text.split()
            for name in sources:
                for file in context(name):
                    inside = file.relative_to(ROOT / name) if (ROOT / name).is_dir() else Path(file.name)
                    place = source / target / inside
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, place)
        elif step.name == "RUN":
            command = re.sub(r"--mount=\S+\s+", "", step.text).replace("/opt/", f"{folder}/opt/")
            print(f"+ {command}", flush=True)
            subprocess.run(["sh", "-ec", command], cwd=source, env=environ, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
