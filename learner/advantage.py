"""Group-relative advantages.

Promises: float64 arithmetic over one complete group; exactly zero for a group whose rewards are all equal; no
dependence on anything outside the group, so neither masks nor the packing can change an advantage.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6  # of the peers and of the published run; the paper's Eq. 9 has none


def group_advantages(rewards: Sequence[float], normalize_by_std: bool = True) -> NDArray[np.float64]:
    """Advantages of all responses of one group (DAPO, Eq. 9; std with n - 1).

    Args:
        rewards: one per response of the complete group, masked responses included, no unit; at least one.
        normalize_by_std: False removes the mean only (Dr. GRPO).

    Returns:
        (responses,) float64, no unit. A group of one has no baseline: it gets its reward, divided by 1 + 1e-6 under
        normalisation, and a warning.
    """
    values = np.asarray(rewards, dtype=np.float64)
    scale = 1.0 + STD_EPSILON
    if len(values) == 1:
        warnings.warn("a group of one response has no baseline; its advantage is its reward", stacklevel=2)
        return values / scale if normalize_by_std else values.copy()
    # Compared, not subtracted: rounding of the mean alone leaves |A| > 0, which a tiny std then blows up.
    if values.max() == values.min():
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + STD_EPSILON) if normalize_by_std else centred
