"""What sampled answers say about a model: pure functions from judged samples to metrics with 95 % intervals.

The unit is the problem, not the sample: every metric is a mean over problems of a number per problem, and its interval
comes from resampling problems. Nothing here knows where samples come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
_SEED = 0  # of the bootstrap alone: the same samples always give the same interval
_CHUNK = 1 << 22  # weights held at a time


class Sample(NamedTuple):
    """One judged response.

    `answer` is what the reward read as the final answer (None: it found none), `truncated` says that the token limit
    cut the response, `tokens` is its length with the end token. `failed`: it could not be judged; it is not correct.
    """

    correct: bool
    answer: str | None
    truncated: bool
    tokens: int
    failed: bool = False


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval; low <= value <= high."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Metrics over problems.

    `samples` is k, the samples per problem (the fewest, where they differ). `pass_at` maps 1, 2, 4, ... and k to pass@.
    `majority` is None where the reward cannot tell answers apart; `no_majority` then says why. `standard_error` is that
    of `accuracy`. `failures` counts samples that could not be judged.
    """

    problems: int
    samples: int
    accuracy: Estimate
    standard_error: float
    pass_at: dict[int, Estimate]
    majority: Estimate | None
    no_majority: str | None
    truncated: Estimate
    tokens: Estimate
    failures: int

    def estimates(self) -> dict[str, Estimate]:
        """Every metric by the name under which it is reported."""
        named = {f"avg@{self.samples}": self.accuracy}
        named |= {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        if self.majority is not None:
            named[f"majority@{self.samples}"] = self.majority
        return {**named, "truncated": self.truncated, "response_tokens": self.tokens}


def pass_at(count: int, correct: int, k: int) -> float:
    """Probability that k of `count` samples, drawn without replacement, hold a correct one.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374, Eq. 1).
    """
    if not (0 <= correct <= count and 1 <= k <= count):
        raise ValueError(f"pass@{k}: {correct} correct of {count}; expected 0 <= correct <= count and 1 <= k <= count")
    return 1.0 - comb(count - correct, k) / comb(count, k)


def majority(samples: Sequence[Sample]) -> float:
    """Share of the most frequent answers that is correct, 0 to 1: answers that tie share the credit.

    Samples without an answer do not vote (Wang et al. 2022, arXiv 2203.11171); without any vote it is 0.
    """
    votes = Counter(sample.answer for sample in samples if sample.answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    won = {answer for answer, number in votes.items() if number == most}
    # All of them have `most` votes, so the mean over votes is the mean over answers.
    return sum(sample.correct for sample in samples if sample.answer in won) / (most * len(won))


def standard_error(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Standard error of the mean of `values`, one per problem; 0 where there are fewer than two."""
    return float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0


def summarise(problems: Sequence[Sequence[Sample]], *, no_majority: str | None = None) -> Summary:
    """Metrics over `problems`, each a list of its samples.

    Args:
        problems: at least one problem, each with at least one sample. A failed sample counts as not correct.
        no_majority: why the reward tells no answers, so that there is nothing to vote on; None: it tells them.

    Raises:
        ValueError: no problem, or a problem without a sample.
    """
    if not problems or not all(problems):
        raise ValueError(f"{len(problems)} problems, one of them without samples, or none at all; nothing to summarise")
    fewest = min(len(samples) for samples in problems)
    ks = [*(1 << i for i in range(fewest.bit_length()) if 1 << i < fewest), fewest]
    rows = [_row(samples, ks) for samples in problems]
    values = np.asarray(rows, dtype=np.float64)
    accuracy, voted, cut, tokens, *passed = _estimates(values)
    return Summary(
        problems=len(rows),
        samples=fewest,
        accuracy=accuracy,
        standard_error=standard_error(values[:, 0]),
        pass_at=dict(zip(ks, passed, strict=True)),
        majority=voted if no_majority is None else None,
        no_majority=no_majority,
        truncated=cut,
        tokens=tokens,
        failures=sum(sample.failed for samples in problems for sample in samples),
    )


def _row(samples: Sequence[Sample], ks: Sequence[int]) -> list[float]:
    """One problem's numbers: accuracy, majority, truncated share, mean length, then pass@k for each of `ks`."""
    count, correct = len(samples), sum(sample.correct for sample in samples)
    return [
        correct / count,
        majority(samples),
        sum(sample.truncated for sample in samples) / count,
        sum(sample.tokens for sample in samples) / count,
        *(pass_at(count, correct, k) for k in ks),
    ]


def _estimates(values: NDArray[np.float64]) -> list[Estimate]:
    """Mean and percentile-bootstrap interval (Efron 1979) of each column of `values`, shape (problems, metrics)."""
    count = len(values)
    random = np.random.default_rng(_SEED)
    means = np.empty((RESAMPLES, values.shape[1]))
    step = max(1, _CHUNK // count)
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        # How often each problem is drawn when `count` problems are drawn with replacement.
        drawn = random.multinomial(count, np.full(count, 1 / count), size=size)
        means[start : start + size] = drawn @ values / count
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    mean = values.mean(axis=0)
    # Rounding must not put an estimate outside its interval where all problems are alike.
    return [Estimate(float(m), float(min(a, m)), float(max(b, m))) for m, a, b in zip(mean, low, high, strict=True)]
