"""A sampled group with a log-probability that is no number."""

from __future__ import annotations

import numpy as np
import pytest

from common.trajectory import VersionRun
from generator.engine import Sampled, check_finite
from generator.rewards import DataFailure


def sampled(*logprobs: float) -> Sampled:
    values = np.array(logprobs, dtype=np.float32)
    return Sampled(np.arange(len(values), dtype=np.int32), values, (VersionRun(0, 0),), "stop", "text")


def test_check_finite_accepts_ordinary_logprobs() -> None:
    check_finite([sampled(-1.0, 0.0), sampled(-30.0)], "g-7")


@pytest.mark.parametrize("wrong", [np.nan, -np.inf, np.inf])
def test_check_finite_one_bad_token_fails_the_group_by_name(wrong: float) -> None:
    with pytest.raises(DataFailure, match=r"group g-7: .* token 1 of response 1 .* -?(nan|inf)"):
        check_finite([sampled(-1.0), sampled(-1.0, wrong, -2.0)], "g-7")
