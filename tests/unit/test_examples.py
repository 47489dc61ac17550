"""Every example is a valid configuration as it stands; none may rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import settings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_examples_exist_with_those_the_readme_names() -> None:
    assert {"quickstart.yaml", "tiny.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_loads_without_overrides_or_environment(path: Path) -> None:
    config = settings.load(path, environ={})
    assert config.broker.url is None, "an example starts its own server, so that it runs anywhere"
