"""Items over bins: nothing lost, never worse than longest-first, as good as trying everything where that is quick."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.balance import deal, fills, longest_first, spread

SIZES = st.lists(st.integers(1, 500), max_size=20)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(1, 6), st.sampled_from([0, 30, 300]))
def test_spread_every_item_once_and_never_fuller_than_longest_first(sizes: list[int], count: int, effort: int) -> None:
    bins = spread(sizes, count, effort)
    assert len(bins) == count
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert max(fills(bins, sizes)) <= max(fills(deal(longest_first(sizes), sizes, count), sizes))
    assert bins == spread(sizes, count, effort)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=7), st.integers(2, 3))
def test_spread_few_items_as_even_as_possible(sizes: list[int], count: int) -> None:
    best = min(
        max(sum(size for size, at in zip(sizes, places, strict=True) if at == index) for index in range(count))
        for places in itertools.product(range(count), repeat=len(sizes))
    )
    assert max(fills(spread(sizes, count), sizes)) == best


def test_spread_where_longest_first_is_a_seventh_off() -> None:
    sizes = [3, 3, 2, 2, 2]
    assert max(fills(spread(sizes, 2, 0), sizes)) == 7
    assert max(fills(spread(sizes, 2), sizes)) == 6
