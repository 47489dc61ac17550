"""Group advantages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantage import group_advantages


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(2, 64), st.booleans())
def test_advantage_equal_rewards_exactly_zero(reward: float, size: int, normalize: bool) -> None:
    assert not group_advantages([reward] * size, normalize).any()


def test_advantage_seven_rewards_that_float32_gets_wrong_exactly_zero() -> None:
    assert not group_advantages(np.full(7, -1.605, dtype=np.float32).tolist()).any()


def test_advantage_two_rewards_half_square_root_of_two() -> None:
    # mean 0, sample std sqrt(2)
    np.testing.assert_allclose(group_advantages([1.0, -1.0]), np.array([1, -1]) / (np.sqrt(2) + 1e-6), rtol=1e-14)


def test_advantage_without_std_only_centred() -> None:
    np.testing.assert_array_equal(group_advantages([3.0, 1.0, 2.0], normalize_by_std=False), [1.0, -1.0, 0.0])


@pytest.mark.parametrize(("normalize", "wanted"), [(True, 0.5 / (1 + 1e-6)), (False, 0.5)])
def test_advantage_group_of_one_its_reward_with_a_warning(normalize: bool, wanted: float) -> None:
    with pytest.warns(UserWarning, match="no baseline"):
        assert group_advantages([0.5], normalize).tolist() == [wanted]
