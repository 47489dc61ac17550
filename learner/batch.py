"""From groups to what the optimizer trains on.

Promises: group advantages come from complete groups, whatever is masked; no token whose policy version is more than
`max_staleness` away from the learner's keeps its mask; N and its relatives are counted in integers over a whole
optimizer step, never over a micro-batch or a rank. Staleness is the distance between the two versions in either
direction: after a restart from an older checkpoint a token may stem from a version the learner no longer knows, which
is as far off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from common.errors import HeadraceError
from common.trajectory import Float32Array, Group, Int32Array, Response
from learner.advantage import group_advantages

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class TrainSequence:
    """One response in a step. Arrays have shape (tokens,); `index` is unique within the step, `staleness` is in policy
    versions, `advantage` is 0 where a critic is to estimate it, `reward` is the shaped one."""

    index: int
    token_ids: Int32Array
    behav_logp: Float32Array
    versions: Int64Array
    mask: BoolArray
    advantage: float
    staleness: Int64Array
    reward: float

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TrainGroup:
    group_id: str
    prompt_ids: Int32Array
    sequences: tuple[TrainSequence, ...]


@dataclass(frozen=True)
class Counts:
    """What a step consists of; add those of the steps of a batch. Totals unless said otherwise.

    Attributes:
        groups, responses, tokens: as delivered; tokens are response tokens.
        flat_groups: groups whose rewards are all equal: their group advantages are zero.
        trained_tokens: tokens whose mask stayed (N of `token_mean`, before rejection).
        expired_tokens: masked because they are too old.
        filtered_tokens: masked by the overlong filter.
        truncated: responses cut off at the length limit.
        longest: tokens of the longest response.
        correct, judged: responses that are correct, and whose correctness is known.
        reward, raw_reward: sums over responses, after and before shaping.
        staleness: trained tokens by distance in policy versions, as sorted (distance, tokens) pairs.
    """

    groups: int = 0
    flat_groups: int = 0
    responses: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    expired_tokens: int = 0
    filtered_tokens: int = 0
    truncated: int = 0
    longest: int = 0
    correct: int = 0
    judged: int = 0
    reward: float = 0.0
    raw_reward: float = 0.0
    staleness: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Counts) -> Counts:
        staleness = Counter(dict(self.staleness))
        staleness.update(dict(other.staleness))
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name not in ("longest", "staleness")
        }
        return Counts(**sums, longest=max(self.longest, other.longest), staleness=tuple(sorted(staleness.items())))

    @property
    def staleness_mean(self) -> float:
        """Versions, over trained tokens; 0 without any."""
        return sum(age * count for age, count in self.staleness) / max(self.trained_tokens, 1)

    @property
    def staleness_max(self) -> int:
        return max((age for age, _ in self.staleness), default=0)


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on, over all ranks.

    `tokens_of_sequence` (sequences,) int64 counts the unmasked tokens; `prompt_of_sequence` (sequences,) int64 is the
    index of a sequence's group; `scale_of_sequence` (sequences,) float64 is the weight of each of its tokens' losses.
    """

    groups: tuple[TrainGroup, ...]
    tokens_of_sequence: Int64Array
    prompt_of_sequence: Int64Array
    scale_of_sequence: Float64Array
    counts: Counts

    @property
    def tokens(self) -> int:
        """Tokens that train. 0: skip the optimizer step."""
        return int(self.tokens_of_sequence.sum())


def sequence_scale(
    tokens_of_sequence: Int64Array, prompt_of_sequence: NDArray[np.integer[Any]], aggregation: str
) -> Float64Array:
    """What the loss of every token of a sequence is multiplied by, so that the step's loss is a plain sum.

    Count the tokens over **all** ranks and micro-batches of the optimizer step first (`tokens_of_sequence`), after
    every mask. Sequences and prompts without a token do not count as sequences or prompts.

    Args:
        tokens_of_sequence: (sequences,) unmasked tokens.
        prompt_of_sequence: (sequences,) index of the sequence's prompt.
        aggregation: of `ObjectiveConfig`; section 3 of the specification.

    Returns:
        (sequences,) float64; 0 for a sequence without tokens.
    """
    tokens = tokens_of_sequence
    sequences = np.count_nonzero(tokens)
    if aggregation == "token_mean":
        divisor = np.full(len(tokens), tokens.sum())
    elif aggregation == "sequence_mean_token_mean":
        divisor = sequences * tokens
    elif aggregation == "sequence_mean_token_sum":
        divisor = np.full(len(tokens), sequences)
    elif aggregation == "prompt_token_mean":
        tokens_of_prompt = np.zeros(int(prompt_of_sequence.max(initial=-1)) + 1, dtype=np.int64)
        np.add.at(tokens_of_prompt, prompt_of_sequence, tokens)
        divisor = np.count_nonzero(tokens_of_prompt) * tokens_of_prompt[prompt_of_sequence]
    else:
        raise HeadraceError(f"objective.aggregation is {aggregation!r}; expected one of the four of ObjectiveConfig")
    return np.divide(1.0, divisor, out=np.zeros(len(tokens)), where=tokens > 0)


def split_groups(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Mini-batches of whole groups, one per optimizer step, whose sizes differ by one at most.

    Dealt in turn: short answers arrive first, and consecutive cuts would sort the mini-batches by length.
    """
    return [list(groups[part::parts]) for part in range(parts)]


def expired(group: Group, config: Config, policy_version: int) -> bool:
    """Whether the whole group is too old to train: every token is (`mask`), or any token is (`drop`, `wait`)."""
    too_old = _too_old(group, config, policy_version)
    return all(too_old) if config.staleness.expired_tokens == "mask" else any(too_old)


def any_too_old(group: Group, config: Config, policy_version: int) -> bool:
    """Whether any token of the group is too old to train."""
    return any(_too_old(group, config, policy_version))


def _too_old(group: Group, config: Config, policy_version: int) -> list[bool]:
    """For each version run of each response."""
    return [
        abs(policy_version - run.version) > config.staleness.max_staleness
        for response in group.responses
        for run in response.versions
    ]


def build_step(groups: Sequence[Group], config: Config, policy_version: int) -> Step:
    """One optimizer step over complete groups, at the learner's policy version before the batch.

    Groups that `expired` names should not be here; if one is, its tokens are masked all the same.

    Raises:
        HeadraceError: the same group twice, or a group sampled at another temperature than the learner's.
    """
    times = Counter(group.group_id for group in groups)
    trained: list[TrainGroup] = []
    counts = Counts(groups=len(groups))
    index = 0
    for group in groups:
        if times[group.group_id] > 1:
            raise HeadraceError(f"group {group.group_id} is {times[group.group_id]} times in one step; expected once")
        if group.temperature != config.sampling.temperature:
            raise HeadraceError(
                f"group {group.group_id} was sampled at temperature {group.temperature}, by {group.generator}; "
                f"sampling.temperature of this learner is {config.sampling.temperature}: all parts need the same file"
            )
        rewards = [response.reward for response in group.responses]
        counts += Counts(flat_groups=int(min(rewards) == max(rewards)))
        advantages = np.zeros(len(rewards))
        if config.objective.advantage.type == "group":
            advantages = group_advantages(rewards, config.objective.normalize_by_std)
        sequences = []
        for response, advantage in zip(group.responses, advantages, strict=True):
            sequence, counted = _sequence(index, response, float(advantage), config, policy_version)
            sequences.append(sequence)
            counts += counted
            index += 1
        trained.append(TrainGroup(group.group_id, group.prompt_ids, tuple(sequences)))
    tokens = np.array([int(s.mask.sum()) for group in trained for s in group.sequences], dtype=np.int64)
    prompts = np.repeat(np.arange(len(trained), dtype=np.int64), [len(group.sequences) for group in trained])
    scale = sequence_scale(tokens, prompts, config.objective.aggregation)
    return Step(tuple(trained), tokens, prompts, scale, counts)


def _sequence(
    index: int, response: Response, advantage: float, config: Config, policy_version: int
) -> tuple[TrainSequence, Counts]:
    versions = response.token_versions()
    staleness = np.abs(policy_version - versions)
    too_old = staleness > config.staleness.max_staleness
    filtered = config.objective.overlong_filter and response.truncated
    mask = ~too_old & (not filtered)
    tokens = len(response.token_ids)
    ages, age_counts = np.unique(staleness[mask], return_counts=True)
    counts = Counts(
        responses=1,
        tokens=tokens,
        trained_tokens=int(mask.sum()),
        expired_tokens=int(too_old.sum()),
        filtered_tokens=int((~too_old).sum()) if filtered else 0,
        truncated=int(response.truncated),
        longest=tokens,
        correct=int(response.correct is True),
        judged=int(response.correct is not None),
        reward=response.reward,
        raw_reward=response.raw_reward,
        staleness=tuple(zip(ages.tolist(), age_counts.tolist(), strict=True)),
    )
    sequence = TrainSequence(
        index, response.token_ids, response.logprobs, versions, mask, advantage, staleness, response.reward
    )
    return sequence, counts
