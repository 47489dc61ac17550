"""The formulas of docs/scaling.md against the simulation, and the page against the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import flat_s, relay_s, simulate_s, table, tree_s

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.parametrize("receivers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(("way", "formula"), [("flat", flat_s), ("relay", relay_s)])
def test_formula_every_piece_simulated_agrees(way: str, formula, receivers: int) -> None:  # type: ignore[no-untyped-def]
    predicted = formula(1e9, receivers, 1e9, 1e7)
    assert simulate_s(way, 1e9, receivers, 1e9, 1e7) == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("receivers", [1, 2, 3, 8, 64])
def test_tree_simulated_without_a_perfect_schedule_within_half_of_the_formula(receivers: int) -> None:
    predicted = tree_s(1e9, receivers, 1e9, 1e7)
    assert 0.95 * predicted < simulate_s("tree", 1e9, receivers, 1e9, 1e7) < 1.5 * predicted


def test_page_has_the_table_of_the_script() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
