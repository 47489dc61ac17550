"""`pytest tests/golden --golden FILE` runs the reference comparisons over another file of the same layout.

Cases the file lacks skip their tests; a file that is no such file ends the run before the first test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import DEFAULT_FILE, Case, LayoutError, load


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, default=None, help="file of reference cases; default: dapo_golden.json")


def golden_file(config: pytest.Config) -> Path:
    path: Path | None = config.getoption("--golden", default=None)
    return path or DEFAULT_FILE


def pytest_configure(config: pytest.Config) -> None:
    try:
        load(golden_file(config))
    except LayoutError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = getattr(metafunc.function, "golden_name", None)
    if name is None:
        return
    path = golden_file(metafunc.config)
    cases = [pytest.param(case, id=case.id) for case in load(path) if case.id.startswith(name)]
    absent = pytest.param(None, id="absent", marks=pytest.mark.skip(reason=f"{path} has no case {name}"))
    metafunc.parametrize("case", cases or [absent])


@pytest.fixture
def golden_path(request: pytest.FixtureRequest) -> Path:
    return golden_file(request.config)


@pytest.fixture
def golden_file_cases(golden_path: Path) -> tuple[Case, ...]:
    return load(golden_path)
