"""Messages the wire's tests damage: valid ones, built field by field."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.wire import pack, pack_array


def packed(dtype: Any, *values: Any) -> dict[str, Any]:
    return pack_array(np.array(values, dtype=dtype))


def runs(*of_response: list[list[int]]) -> dict[str, Any]:
    """The fields of a group that hold the version runs [version, start] of its responses."""
    return {
        "runs": packed(np.int32, *(len(each) for each in of_response)),
        "run_versions": packed(np.int64, *(version for each in of_response for version, _ in each)),
        "run_starts": packed(np.int32, *(start for each in of_response for _, start in each)),
    }


def a_group(**changes: Any) -> bytes:
    """Two responses of three tokens each."""
    good = {
        "id": "000000007",
        "prompt": packed(np.int32, 1, 2),
        "size": 2,
        "generator": "g0",
        "temperature": 1.0,
        "sampled_at": 1.5,
        "version": 3,
        "lengths": packed(np.int32, 3, 3),
        "finish": packed(np.uint8, 0, 1),
        "raw_rewards": packed(np.float64, 1.0, 0.0),
        "rewards": packed(np.float64, 0.5, 0.0),
        "correct": packed(np.uint8, 1, 0),
        "tokens": packed(np.int32, 5, 6, 7, 5, 6, 7),
        "logprobs": packed(np.float32, -0.1, -0.2, -0.3, -0.1, -0.2, -0.3),
        **runs([[3, 0], [4, 2]], [[3, 0], [4, 2]]),
    }
    return pack("group", {**good, **changes})


def a_prompt(**changes: Any) -> bytes:
    good = {
        "id": "000000007",
        "ids": pack_array(np.array([1, 2], dtype=np.int32)),
        "text": "1 + 1 =",
        "columns": {},
        "attempt": 0,
        "version": 0,
    }
    return pack("prompt", {**good, **changes})
