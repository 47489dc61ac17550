"""What travels between the rooms: a prompt on its way out, a group of trajectories on its way back.

All arrays are one-dimensional numpy arrays with fixed dtypes, so that they cross the wire as raw little-endian bytes
(see `common.wire`). Units: tokens, nats, seconds since the epoch, policy versions (integers counting optimizer steps
whose weights were published; 0 is the initial model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]

FinishReason = Literal["stop", "length"]

# Where a prompt's right answer is looked for, first hit wins: the DAPO schema, reasoning-gym and the two names that are
# common in published data sets.
TRUTH_COLUMNS = ("ground_truth", "answer", "solution")


def find_truth(columns: Mapping[str, Any]) -> str | None:
    """The right answer among a prompt's columns; None where no column of `TRUTH_COLUMNS` holds one."""
    return next((str(columns[name]) for name in TRUTH_COLUMNS if columns.get(name) is not None), None)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the feeder releases it.

    `group_id` names the prompt, and later its group, for the whole life of the run. `attempt` counts data failures
    before this release (0: none). `released_version` is the learner's policy version at the release.
    """

    group_id: str
    token_ids: Int32Array
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    released_version: int = 0


@dataclass(frozen=True)
class VersionRun:
    """Tokens from index `start` (within the response) up to the next run were sampled by policy `version`."""

    version: int
    start: int


@dataclass(frozen=True)
class Response:
    """One sampled response. `token_ids` and `logprobs` have one entry per response token, end token included.

    `logprobs` are the behaviour policy's, after temperature, in nats. `raw_reward` is what the reward function gave,
    `reward` is what the advantage is computed from (after overlong punishment), `correct` is the raw correctness that
    dynamic sampling judges (None where the reward cannot tell).
    """

    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    raw_reward: float
    reward: float
    correct: bool | None

    def token_versions(self) -> NDArray[np.int64]:
        """Policy version of every token, shape (tokens,)."""
        out = np.empty(len(self.token_ids), dtype=np.int64)
        for run in self.versions:
            out[run.start :] = run.version
        return out

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class PartialResponse:
    """What there is of a response: arrays and `versions` as in `Response`, all empty where nothing was sampled yet.
    `finish_reason` None: it is not finished."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason | None = None


NOTHING_YET = PartialResponse(np.empty(0, np.int32), np.empty(0, np.float32), ())


@dataclass(frozen=True)
class PartialGroup:
    """What there is of a group, of each of its responses in order: what another generator goes on from."""

    group_id: str
    responses: tuple[PartialResponse, ...]
    temperature: float

    @property
    def tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)


@dataclass(frozen=True)
class EvalAnswer:
    """One judged response to an evaluation prompt, `tokens` long, sampled by policies `oldest_version` to
    `newest_version`. `reward` is None where the reward failed, `correct` also where it cannot tell."""

    tokens: int
    truncated: bool
    reward: float | None
    correct: bool | None
    oldest_version: int
    newest_version: int


@dataclass(frozen=True)
class EvalAnswers:
    """All responses to prompt `index` of the evaluation round of policy `version`; none where vLLM refused it."""

    version: int
    index: int
    answers: tuple[EvalAnswer, ...]


@dataclass(frozen=True)
class Group:
    """All responses to one prompt, complete: advantages are computed over it and it is trained or dropped whole."""

    group_id: str
    prompt_ids: Int32Array
    responses: tuple[Response, ...]
    generator: str
    temperature: float
    sampled_at: float
    released_version: int = 0

    @property
    def oldest_version(self) -> int:
        return min(run.version for response in self.responses for run in response.versions)

    @property
    def response_tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)
