"""Which groups a batch takes, and when `wait` lets it go: groups of one response, four a step, a bound of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from learner_inputs import make_config, make_group, make_response

from broker import Delivery
from learner.pending import Pending


def pending(policy: str, *released: int, staleness: int = 2) -> Pending:
    """Groups that arrived in this order, named after their position, all sampled by the version of their release."""
    config = make_config(
        staleness={"max_staleness": staleness, "expired_tokens": policy}, learner={"groups_per_step": 4}
    )
    waiting, rng = Pending(config), np.random.default_rng(0)
    for position, version in enumerate(released):
        response = make_response(rng, 3, 1.0, [(version, 0)])
        group = replace(make_group(rng, str(position), 2, [1]), responses=(response,), released_version=version)
        waiting.add(Delivery(f"{position}-0", group))
    return waiting


def names(batch: tuple[Delivery, ...] | None) -> str | None:
    return None if batch is None else "".join(each.group.group_id for each in batch)


def outstanding(*released: int, version: int, staleness: int = 2) -> list[int]:
    """N(j) for all that is outstanding, arrived or not."""
    return [sum(each <= bound for each in released) for bound in range(version - staleness, version + 1)]


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_choose_in_order_of_arrival_whatever_is_outstanding(policy: str) -> None:
    waiting = pending(policy, 6, 5, 6, 4, 4)
    assert waiting.bounds(6) == []
    assert names(waiting.choose(6, [])) == "0123"
    assert names(waiting.choose(6, [])) is None
    assert not waiting.full


def test_choose_wait_takes_the_oldest_releases_first() -> None:
    waiting = pending("wait", 6, 5, 6, 4, 4)
    assert waiting.bounds(6) == [4, 5, 6]
    assert names(waiting.choose(6, outstanding(6, 5, 6, 4, 4, version=6))) == "3410"


@pytest.mark.parametrize(
    ("in_flight", "goes"),
    [
        ((), True),
        ((6,) * 7, True),  # released now: any of the next two batches will do
        ((5,) * 4, True),  # the next batch takes them all
        ((5,) * 4 + (6,) * 3, True),
        ((4,), False),  # due in this very batch
        ((5,) * 5, False),  # one of them is due in this batch, since the next has room for four
    ],
)
def test_choose_wait_goes_only_where_nothing_due_is_left_behind(in_flight: tuple[int, ...], goes: bool) -> None:
    arrived = (6, 6, 6, 6, 6)
    waiting = pending("wait", *arrived)
    batch = waiting.choose(6, outstanding(*arrived, *in_flight, version=6))
    assert (batch is not None) is goes
    assert waiting.full is not goes, "what could not go yet still waits"


def test_choose_wait_with_more_due_than_fit_takes_a_batch_of_them() -> None:
    """A resumed learner: trained groups came back on top of the budget."""
    arrived = (4, 4, 4, 4, 6)
    assert names(pending("wait", *arrived).choose(6, outstanding(*arrived, *(4,) * 9, version=6))) == "0123"
    assert pending("wait", 4, 4, 4, 6, 6).choose(6, outstanding(4, 4, 4, 6, 6, *(4,) * 9, version=6)) is None


def test_choose_wait_without_staleness_waits_for_all_that_is_outstanding() -> None:
    waiting = pending("wait", 3, 3, 3, 3, staleness=0)
    assert waiting.choose(3, [5]) is not None, "more than the budget allows: as many as fit"
    assert pending("wait", 3, 3, 3, staleness=0).choose(3, [4]) is None


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([1, 1, 1, 1, 1], ["0123"]),  # groups make it full
        ([9, 1, 2, 10, 1], ["01", "23"]),  # the group that reaches the limit is in
        ([30, 1, 1, 1, 1], ["0", "1234"]),
        ([3, 3, 3], []),
    ],
)
def test_choose_a_step_is_full_at_its_groups_or_tokens(lengths: list[int], batches: list[str]) -> None:
    config = make_config(learner={"groups_per_step": 4, "tokens_per_step": 10})
    waiting, rng = Pending(config), np.random.default_rng(0)
    for position, length in enumerate(lengths):
        waiting.add(Delivery(f"{position}-0", make_group(rng, str(position), 2, [length])))
    taken = []
    while waiting.full:
        taken.append(names(waiting.choose(0, [])))
    assert taken == batches
    assert waiting.choose(0, []) is None


@pytest.mark.parametrize("staleness", [{"expired_tokens": "wait"}, {"max_staleness": 0}])
def test_tokens_per_step_refused_where_what_is_left_would_be_too_old(staleness: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"learner\.tokens_per_step is 10"):
        make_config(learner={"tokens_per_step": 10}, staleness=staleness)


@pytest.mark.parametrize(("policy", "gone"), [("mask", "2"), ("drop", "12"), ("wait", "12")])
def test_take_expired_gives_each_group_once(policy: str, gone: str) -> None:
    waiting, rng = pending(policy, 6), np.random.default_rng(0)
    for name, versions in (("1", [(3, 0), (5, 1)]), ("2", [(3, 0)])):
        group = replace(make_group(rng, name, 2, [1]), responses=(make_response(rng, 3, 1.0, versions),))
        waiting.add(Delivery(f"{name}-0", group))
    assert names(tuple(waiting.take_expired(6))) == gone
    assert waiting.take_expired(6) == []
