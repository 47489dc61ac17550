"""Fixtures of the unit tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """That of the tiny model of `examples/make_models.py`."""
    path = Path(__file__).parents[2] / "examples" / "make_models.py"
    spec = importlib.util.spec_from_file_location("make_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiny_tokenizer()
