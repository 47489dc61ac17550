"""Every example is a valid configuration as it stands; none may rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import settings

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


OVERLAYS = sorted((Path(__file__).parents[2] / "examples" / "table1").glob("*.yaml"))
RECIPE = Path(__file__).parents[2] / "examples" / "dapo-qwen2.5-32b.yaml"


@pytest.mark.parametrize("rows", range(1, len(OVERLAYS) + 1))
def test_every_row_of_table_1_turns_on_one_more_technique(rows: int) -> None:
    config = settings.load(RECIPE, [str(path) for path in OVERLAYS[:rows]], {})
    objective = config.objective
    techniques = [
        True,
        objective.overlong_filter,
        objective.clip_high > objective.clip_low,
        objective.overlong_cache_tokens > 0,
        objective.aggregation == "token_mean",
        config.sampling.dynamic_sampling,
    ]
    assert techniques == [number < rows for number in range(6)]


def test_last_row_is_the_recipe_but_for_overlong_filtering() -> None:
    last = settings.load(RECIPE, [*map(str, OVERLAYS), "objective.overlong_filter=false"], {})
    assert last == settings.load(RECIPE, environ={})


def test_examples_exist_with_those_the_readme_names() -> None:
    assert {"quickstart.yaml", "tiny.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_loads_without_overrides_or_environment(path: Path) -> None:
    config = settings.load(path, environ={})
    assert config.broker.url is None, "an example starts its own server, so that it runs anywhere"
