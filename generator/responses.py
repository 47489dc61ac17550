"""Responses while they are sampled: what an earlier generator left of them, and what this engine adds.

What it promises: every token keeps the log-probability and the version that the engine which sampled it gave it. A
response that was continued is one response whose version runs have one more seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config import Config
from common.errors import HeadraceError
from common.trajectory import (
    NOTHING_YET,
    FinishReason,
    Float32Array,
    Int32Array,
    PartialGroup,
    PartialResponse,
    VersionRun,
)
from generator.rewards import DataFailure


class EngineError(HeadraceError):
    """The engine died, or a control call did not return in time: this process cannot go on."""


class Interrupted(Exception):
    """The engine was told to stop sampling; what there is of the response has been reported."""


@dataclass(frozen=True)
class Sampled:
    """One response: token ids and log-probabilities (nats) of shape (tokens,), the end token included."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    text: str


class Growing:
    """One response: `before`, then what vLLM's outputs (of kind DELTA) of request `request_id` add."""

    def __init__(self, before: PartialResponse, request_id: str) -> None:
        self.before, self.request_id, self.text = before, request_id, ""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def tokens(self) -> int:
        """Tokens added here."""
        return len(self._token_ids)

    def add(self, completion: Any) -> None:
        """Append an output's tokens. Raises EngineError where their log-probabilities are not theirs."""
        token_ids = list(completion.token_ids)
        flat = completion.logprobs
        if token_ids and list(flat.token_ids) != token_ids:
            raise EngineError(
                f"request {self.request_id}: {len(token_ids)} tokens, log-probabilities of {len(flat.token_ids)}"
            )
        if token_ids:
            self._token_ids += token_ids
            self._logprobs += flat.logprobs
        self.text += completion.text

    def so_far(self, spans: Sequence[Any] | None, finish_reason: FinishReason | None) -> PartialResponse:
        """What there is of it; `spans` are the engine's versions of the tokens it added, from 0 on."""
        if not self._token_ids:
            return self.before
        before = len(self.before.token_ids)
        runs = list(self.before.versions)
        for run in version_runs(spans, self.request_id):
            if run.start < len(self._token_ids) and not (runs and runs[-1].version == run.version):
                runs.append(VersionRun(run.version, before + run.start))
        return PartialResponse(
            np.concatenate([self.before.token_ids, np.asarray(self._token_ids, dtype=np.int32)]),
            np.concatenate([self.before.logprobs, np.asarray(self._logprobs, dtype=np.float32)]),
            tuple(runs),
            finish_reason,
        )


def version_runs(spans: Sequence[Any] | None, request_id: str) -> tuple[VersionRun, ...]:
    """vLLM's weight-version spans as version runs."""
    runs = tuple(VersionRun(int(span.version), span.start) for span in spans or () if span.end > span.start)
    if not runs or runs[0].start != 0:
        raise EngineError(f"request {request_id}: the engine stamped no weight version on its tokens")
    return runs


def check_finite(samples: Sequence[Sampled], group_id: str) -> None:
    """Refuse a group with a log-probability that is not finite: no ratio could be formed from it.

    Raises:
        DataFailure: names the group, the response and the token.
    """
    for index, sample in enumerate(samples):
        wrong = np.flatnonzero(~np.isfinite(sample.logprobs))
        if len(wrong):
            raise DataFailure(
                f"group {group_id}: the engine gave token {wrong[0]} of response {index} the log-probability "
                f"{sample.logprobs[wrong[0]]}; expected a finite one",
                "logprobs",
            )


def usable(partial: PartialGroup | None, config: Config, version: int) -> tuple[PartialResponse, ...]:
    """Of each response what an engine that samples with `version` goes on from; the others begin afresh.

    A response goes on where it could still train at this version: with `staleness.expired_tokens: mask` some token
    must be recent enough, with `drop` and `wait`, where one old token condemns the group, every token. One that another
    configuration sampled (temperature, response limit) begins afresh too.
    """
    sampling, staleness = config.sampling, config.staleness
    if partial is None or partial.temperature != sampling.temperature:
        return (NOTHING_YET,) * sampling.group_size

    def goes_on(response: PartialResponse) -> bool:
        tokens = len(response.token_ids) + (response.finish_reason is None)
        ages = [abs(version - run.version) for run in response.versions]
        decisive = min if staleness.expired_tokens == "mask" else max
        return tokens <= sampling.max_response_tokens and decisive(ages, default=0) <= staleness.max_staleness

    return tuple(response if goes_on(response) else NOTHING_YET for response in partial.responses)
