"""What a reward returns and what follows from it: pure functions over one group's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.config import Config
from common.errors import HeadraceError

FailureKind = Literal["prompt", "logprobs", "reward_raised", "reward_timeout", "reward_died", "reward_value"]


class DataFailure(HeadraceError):
    """This prompt failed, never a reward of 0.

    `kind`: vLLM does not take the prompt; a log-probability is not finite; the reward raised, was too late, ended its
    worker, or returned what is no reward.
    """

    def __init__(self, text: str, kind: FailureKind) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Score:
    """The raw reward of one completion.

    `correct` is None where the reward cannot tell right from wrong; `answer` is the final answer that it read, None
    where it found none or does not tell.
    """

    reward: float
    correct: bool | None
    answer: str | None = None


def uninformative(scores: Sequence[Score]) -> Literal["correct", "wrong", "equal"] | None:
    """Why a group cannot teach anything, judged on raw correctness; None: it can.

    Where correctness is unknown, a group is uninformative when all its rewards are equal.
    """
    if any(score.correct is None for score in scores):
        rewards = [score.reward for score in scores]
        return "equal" if max(rewards) == min(rewards) else None
    right = sum(bool(score.correct) for score in scores)
    if right == len(scores):
        return "correct"
    return "wrong" if right == 0 else None


def shape(scores: Sequence[Score], lengths: Sequence[int], config: Config) -> list[float]:
    """Rewards for the advantage: the raw ones plus the soft overlong punishment (DAPO, arXiv 2503.14476, Eq. 13).

    Args:
        scores: raw scores of one group.
        lengths: response tokens, end token included; one per score.
        config: `sampling.max_response_tokens` is L_max, `objective.overlong_cache_tokens` is L_cache (0: off).
    """
    limit, cache = config.sampling.max_response_tokens, config.objective.overlong_cache_tokens
    return [score.reward + _punishment(length, limit, cache) for score, length in zip(scores, lengths, strict=True)]


def _punishment(length: int, limit: int, cache: int) -> float:
    if cache == 0:
        return 0.0
    return min(0.0, max(-1.0, (limit - cache - length) / cache))
