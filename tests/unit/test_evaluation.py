"""Metrics of an evaluation, by hand: pass@k, majority, intervals, failures."""

from __future__ import annotations

import numpy as np
import pytest

from common.evaluation import Sample, majority, pass_at, summarise


def _samples(*answers: str | None, truth: str = "1", truncated: bool = False, tokens: int = 10) -> list[Sample]:
    return [Sample(answer == truth, answer, truncated, tokens) for answer in answers]


@pytest.mark.parametrize(
    ("count", "correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2)
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3)
        (32, 16, 1, 1 / 2),
        (32, 31, 2, 1.0),
        (32, 0, 32, 0.0),
        (32, 1, 32, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_is_the_unbiased_estimator(count: int, correct: int, k: int, expected: float) -> None:
    assert pass_at(count, correct, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("count", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_refuses_impossible_counts(count: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= correct"):
        pass_at(count, correct, k)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["1", "1", "2"], 1.0),
        (["2", "2", "1"], 0.0),
        (["1", "2"], 1 / 2),
        (["1", "2", "3", None], 1 / 3),
        (["1", "1", "2", "2", "3"], 1 / 2),
        (["1", None, None, None], 1.0),  # no answer, no vote
        ([None, None], 0.0),
        (["2", "3"], 0.0),
    ],
)
def test_majority_shares_credit_between_ties(answers: list[str | None], expected: float) -> None:
    assert majority(_samples(*answers)) == pytest.approx(expected, abs=1e-15)


def test_summary_by_hand() -> None:
    summary = summarise(
        [
            _samples("1", "1", "2", "2", tokens=10),  # accuracy 1/2, pass@2 5/6, majority 1/2
            _samples("1", "2", "2", None, tokens=20, truncated=True),  # 1/4, 1/2, 0
            _samples("1", "1", "1", "3", tokens=60),  # 3/4, 1, 1
        ]
    )
    assert (summary.problems, summary.samples, summary.failures) == (3, 4, 0)
    assert summary.accuracy.value == pytest.approx(1 / 2)
    assert summary.standard_error == pytest.approx(0.25 / 3**0.5)
    assert {k: e.value for k, e in summary.pass_at.items()} == pytest.approx({1: 1 / 2, 2: 7 / 9, 4: 1.0})
    assert summary.majority is not None and summary.majority.value == pytest.approx(1 / 2)
    assert summary.truncated.value == pytest.approx(1 / 3)
    assert summary.tokens.value == pytest.approx(30)
    names = ["avg@4", "pass@1", "pass@2", "pass@4", "majority@4", "truncated", "response_tokens"]
    assert list(summary.estimates()) == names
    for estimate in summary.estimates().values():
        assert estimate.low <= estimate.value <= estimate.high
    # Three problems: an extreme resample (one problem thrice) has probability 1/27 > 2.5 %.
    assert (summary.accuracy.low, summary.accuracy.high) == pytest.approx((1 / 4, 3 / 4))


def test_interval_is_the_same_each_time_and_that_of_the_binomial() -> None:
    problems = [_samples("1" if i < 30 else "2") for i in range(100)]
    first, second = summarise(problems), summarise(problems)
    assert first == second
    # Resampled means of 0s and 1s are Binomial(100, 0.3)/100, whose 2.5 % and 97.5 % quantiles are 0.21 and 0.39.
    assert (first.accuracy.low, first.accuracy.high) == pytest.approx((0.21, 0.39), abs=0.0101)


def test_resampling_in_pieces_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [_samples(*("1" if (i * j) % 3 else "2" for j in range(4))) for i in range(50)]
    whole = summarise(problems)
    monkeypatch.setattr("common.evaluation._CHUNK", 50 * 999)
    pieces = summarise(problems)
    assert [(e.low, e.high) for e in pieces.estimates().values()] == [
        pytest.approx((e.low, e.high)) for e in whole.estimates().values()
    ]


@pytest.mark.parametrize(("answer", "value"), [("1", 1.0), ("2", 0.0)])
@pytest.mark.parametrize("k", [1, 3, 32])
def test_all_right_and_all_wrong(answer: str, value: float, k: int) -> None:
    summary = summarise([_samples(*[answer] * k)] * 7)
    assert list(summary.pass_at) == {1: [1], 3: [1, 2, 3], 32: [1, 2, 4, 8, 16, 32]}[k]
    assert summary.majority is not None
    for estimate in (summary.accuracy, summary.majority, *summary.pass_at.values()):
        assert (estimate.low, estimate.value, estimate.high) == (value, value, value)
    assert summary.standard_error == 0


def test_one_problem_and_one_sample() -> None:
    summary = summarise([_samples("1")])
    assert summary.accuracy.value == summary.pass_at[1].value == 1.0
    assert summary.standard_error == 0


def test_failed_samples_are_not_correct_and_are_counted_apart() -> None:
    failed = Sample(False, None, False, 8, failed=True)
    summary = summarise([_samples("1", "1"), [failed, failed]])
    assert summary.accuracy.value == 1 / 2
    assert summary.failures == 2


def test_estimates_of_equal_problems_have_no_rounding_errors_outside_the_interval() -> None:
    summary = summarise([_samples("1", "2", "2", "1", "1", "2", "2")] * 11)
    for estimate in summary.estimates().values():
        assert estimate.low <= estimate.value <= estimate.high
        assert np.isclose(estimate.low, estimate.high)


def test_majority_is_absent_with_a_reason_where_answers_are_unknown() -> None:
    summary = summarise([_samples(None, None)], no_majority="the reward tells no answers")
    assert summary.majority is None and summary.no_majority == "the reward tells no answers"
    assert not any(name.startswith("majority") for name in summary.estimates())


@pytest.mark.parametrize("problems", [[], [[]], [_samples("1"), []]])
def test_nothing_to_summarise_is_refused(problems: list[list[Sample]]) -> None:
    with pytest.raises(ValueError, match="nothing to summarise"):
        summarise(problems)


def test_problems_with_fewer_samples_set_k() -> None:
    summary = summarise([_samples("1", "2", "1", "1"), _samples("1", "2")])
    assert summary.samples == 2 and list(summary.pass_at) == [1, 2]
    assert summary.accuracy.value == pytest.approx((3 / 4 + 1 / 2) / 2)
