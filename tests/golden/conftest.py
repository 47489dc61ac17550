"""`pytest tests/golden --golden FILE` runs the reference comparisons over another file of the same layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import DEFAULT_FILE, load


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, default=None, help="file of reference cases; default: dapo_golden.json")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = getattr(metafunc.function, "golden_name", None)
    if name is None:
        return
    path = metafunc.config.getoption("--golden", default=None) or DEFAULT_FILE
    cases = [case for case in load(path) if case.id.startswith(name)]
    metafunc.parametrize("case", cases, ids=[case.id for case in cases])
