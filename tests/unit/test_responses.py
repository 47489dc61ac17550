"""What a response goes on from, and the seam where it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from common.config import Config
from common.trajectory import NOTHING_YET, FinishReason, PartialGroup, PartialResponse, VersionRun
from generator.responses import EngineError, Growing, usable


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Flat:
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Completion:
    """vLLM's, of kind DELTA."""

    token_ids: list[int]
    logprobs: Flat = field(init=False)
    text: str = "x"

    def __post_init__(self) -> None:
        self.logprobs = Flat(list(self.token_ids), [-float(token) for token in self.token_ids])


def begun(tokens: int, *runs: tuple[int, int], finish: FinishReason | None = None) -> PartialResponse:
    token_ids = np.arange(tokens, dtype=np.int32)
    return PartialResponse(token_ids, -token_ids.astype(np.float32), tuple(VersionRun(*run) for run in runs), finish)


@pytest.mark.parametrize(
    ("before", "spans", "runs"),
    [
        (NOTHING_YET, [Span("2", 0, 3)], [(2, 0)]),
        (begun(4, (1, 0), (2, 3)), [Span("2", 0, 3)], [(1, 0), (2, 3)]),  # the same weights: no seam
        (begun(4, (1, 0)), [Span("2", 0, 1), Span("3", 1, 3)], [(1, 0), (2, 4), (3, 5)]),
        (begun(4, (7, 0)), [Span("2", 0, 3)], [(7, 0), (2, 4)]),  # versions may fall
        (begun(4, (1, 0)), [Span("2", 0, 3), Span("3", 3, 5)], [(1, 0), (2, 4)]),  # the engine is two tokens ahead
    ],
)
def test_continued_response_has_one_more_seam_where_the_version_changed(
    before: PartialResponse, spans: list[Span], runs: list[tuple[int, int]]
) -> None:
    growing = Growing(before, "r")
    assert growing.so_far(None, None) is before
    for chunk in ([10], [11, 12], []):
        growing.add(Completion(chunk))
    response = growing.so_far(spans, "stop")
    assert response.token_ids.tolist() == [*before.token_ids.tolist(), 10, 11, 12]
    assert response.logprobs.tolist() == [*before.logprobs.tolist(), -10.0, -11.0, -12.0]
    assert (response.token_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
    assert [(run.version, run.start) for run in response.versions] == runs
    assert growing.tokens == 3 and response.finish_reason == "stop"


def test_tokens_without_a_version_or_their_log_probabilities_are_refused() -> None:
    growing = Growing(begun(4, (1, 0)), "r")
    wrong = Completion([10, 11])
    wrong.logprobs.token_ids[1] = 12
    with pytest.raises(EngineError, match="request r: 2 tokens"):
        growing.add(wrong)
    growing.add(Completion([10]))
    for spans in (None, [], [Span("2", 1, 2)]):
        with pytest.raises(EngineError, match="stamped no weight version"):
            growing.so_far(spans, None)


def config(mode: str, **sampling: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "none"},
            "prompts": {"type": "dataset", "path": "none"},
            "reward": {"type": "math_dapo"},
            "sampling": {"group_size": 2, "max_response_tokens": 8, **sampling},
            "staleness": {"max_staleness": 2, "expired_tokens": mode},
        }
    )


@pytest.mark.parametrize("mode", ["mask", "drop", "wait"])
@pytest.mark.parametrize(
    ("response", "masked", "whole"),
    [
        (NOTHING_YET, True, True),
        (begun(4, (3, 0)), True, True),
        (begun(4, (2, 0)), False, False),  # nothing of it can train any more
        (begun(4, (2, 0), (3, 2)), True, False),  # half of it can, which `drop` and `wait` do not let
        (begun(4, (7, 0)), True, True),
        (begun(4, (8, 0)), False, False),  # of a learner whose successor resumed from an older checkpoint
        (begun(4, (2, 0), finish="stop"), False, False),  # a finished sibling is judged alike
        (begun(8, (5, 0), finish="length"), True, True),
        (begun(8, (5, 0)), False, False),  # sampled under a greater limit
        (begun(9, (5, 0), finish="stop"), False, False),
    ],
)
def test_response_goes_on_where_it_can_still_train(
    mode: str, response: PartialResponse, masked: bool, whole: bool
) -> None:
    kept, other = usable(PartialGroup("7", (response, begun(1, (5, 0))), 1.0), config(mode), 5)
    assert kept is (response if (masked if mode == "mask" else whole) else NOTHING_YET)
    assert len(other.token_ids) == 1, "each response is judged by itself"


def test_group_of_another_temperature_and_no_group_begin_afresh() -> None:
    partial = PartialGroup("7", (begun(1, (5, 0)),) * 2, 1.0)
    assert usable(partial, config("mask", temperature=0.9), 5) == (NOTHING_YET, NOTHING_YET)
    assert usable(None, config("mask"), 5) == (NOTHING_YET, NOTHING_YET)
