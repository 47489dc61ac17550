"""The arrows between the rooms, and that each entry point names something that exists."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("common", "broker", "generator", "learner", "k8s")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the arrows of pyproject.toml on the packages in `folder`."""
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as run; run()"
    arguments = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def rooms_with(folder: Path, importer: str, imported: str) -> Path:
    """The rooms as packages, of which one imports another, not at the top level but inside a function."""
    for room in ROOMS:
        (folder / room).mkdir()
        (folder / room / "__init__.py").touch()
    (folder / importer / "work.py").write_text(f"def f() -> None:\n    import {imported}\n")
    return folder


def test_rooms_import_only_along_the_arrows() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "importer, imported",
    [
        ("common", "broker"),
        ("common", "generator"),
        ("common", "learner"),
        ("broker", "generator"),
        ("broker", "learner"),
        ("generator", "learner"),
        ("learner", "generator"),
        ("common", "k8s"),
        ("broker", "k8s"),
        ("generator", "k8s"),
        ("k8s", "learner"),
    ],
)
def test_import_against_an_arrow_is_found(tmp_path: Path, importer: str, imported: str) -> None:
    result = lint(rooms_with(tmp_path, importer, imported))
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{importer}.work -> {imported}" in result.stdout


@pytest.mark.parametrize("importer, imported", [("broker", "common"), ("generator", "broker"), ("learner", "broker")])
def test_import_along_an_arrow_is_allowed(tmp_path: Path, importer: str, imported: str) -> None:
    assert lint(rooms_with(tmp_path, importer, imported)).returncode == 0


@pytest.mark.parametrize("room", ROOMS)
def test_init_of_a_room_hands_on_names_and_nothing_else(room: str) -> None:
    body = ast.parse((ROOT / room / "__init__.py").read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    assert [ast.unparse(node) for node in body if not isinstance(node, allowed)] == []


ENTRY_POINTS = [
    *((f"headrace = {PROJECT['scripts']['headrace']}",)),
    *(f"{name} = {value}" for group in PROJECT["entry-points"].values() for name, value in group.items()),
]


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_entry_point_names_something_that_exists(entry: str) -> None:
    module, _, name = entry.partition(" = ")[2].partition(":")
    body = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text()).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    assert name in defined


def test_config_command_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; sys.argv = ['headrace', 'config', 'schema']\n"
        "from common.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print([m for m in ('torch', 'vllm', 'deepspeed', 'transformers') if m in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"
