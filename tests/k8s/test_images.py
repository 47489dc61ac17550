"""The Dockerfiles, as far as that can be told without an engine: what they copy, run and start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.k8s.dockerfiles import ROOT, Instruction, context, read

IMAGES = sorted((ROOT / "k8s" / "images").glob("Dockerfile.*"))


@pytest.fixture(params=IMAGES, ids=lambda path: path.name)
def steps(request: pytest.FixtureRequest) -> list[Instruction]:
    return read(request.param)


def of(steps: list[Instruction], name: str, stage: int = 1) -> list[str]:
    return [step.text for step in steps if (step.name, step.stage) == (name, stage)]


def test_there_is_one_for_gpus_and_one_for_cpus() -> None:
    assert [path.name for path in IMAGES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


def test_image_is_small_pinned_and_not_root(steps: list[Instruction]) -> None:
    assert [step.name for step in steps].count("FROM") == 2
    assert all(re.search(r"python:3\.11\.\d+-", text) for stage in (0, 1) for text in of(steps, "FROM", stage))
    assert of(steps, "USER") == ["10001:10001"]
    assert "slim" in of(steps, "FROM")[0]
    assert of(steps, "HEALTHCHECK")
    assert "org.opencontainers.image.version" in of(steps, "LABEL")[0]


def test_everything_that_is_copied_is_in_the_context(steps: list[Instruction]) -> None:
    for text in of(steps, "COPY", stage=0):
        for name in text.split()[:-1]:
            assert list(context(name)), name


def test_context_holds_what_is_needed_and_nothing_else() -> None:
    names = {str(file.relative_to(ROOT)) for file in context(".")}
    assert {"broker/lua/append.lua", "k8s/headrace/Chart.yaml", "requirements/gpu.txt"} <= names
    assert {name.split("/")[0] for name in names} == {
        "Makefile", "pyproject.toml", "README.md", "LICENSE", "requirements",
        "common", "broker", "generator", "learner", "k8s",
    }  # fmt: skip
    assert not [name for name in names if "__pycache__" in name or "images" in name]


def test_every_room_is_copied(steps: list[Instruction]) -> None:
    copied = {text.split()[0] for text in of(steps, "COPY", stage=0)}
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    assert set(re.findall(r'"(\w+)\*"', packages[1])) <= copied


def test_build_steps_are_targets_of_the_makefile(steps: list[Instruction], request: pytest.FixtureRequest) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [re.sub(r"--mount=\S+\s+", "", text).split() for text in of(steps, "RUN", stage=0)]
    assert [command[:2] for command in commands] == [["make", "runtime-packages"], ["make", "runtime"]]
    for command in commands:
        assert command[1] in targets
        requirements = dict(each.split("=") for each in command[2:])["REQUIREMENTS"]
        assert Path(requirements).stem in request.node.callspec.id


def test_health_check_asks_what_the_probes_ask(steps: list[Instruction]) -> None:
    assert "http://127.0.0.1:{p}/healthz" in of(steps, "HEALTHCHECK")[0]
    assert "HEADRACE__METRICS__PORT" in of(steps, "HEALTHCHECK")[0], "without metrics there is nothing to ask"
