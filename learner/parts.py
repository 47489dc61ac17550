"""Parts of groups, the pieces that rows are made of, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from learner.batch import TrainGroup, TrainSequence

# Cost of a token, where attention costs 1 for a token and one that it is compared with (`learner.attention`). About
# right for a 7B model (6 x hidden size), and only the shape matters: rows of a lock-step should cost the same.
LINEAR_COST = 24_576.0


def row_cost(tokens: int, pairs: int | None = None) -> float:
    """Cost of forward and backward, in units without meaning: linear + quadratic.

    Args:
        tokens: to compute.
        pairs: of tokens that attention compares; None: all with all, as in one sequence.
    """
    return LINEAR_COST * tokens + float(tokens**2 if pairs is None else pairs)


def response_cost(prompt: int, tokens: int) -> float:
    """What a response of so many tokens adds to its prompt."""
    return row_cost(tokens, tokens * (tokens + prompt))


class Part(NamedTuple):
    """Some responses of a group, which share their prompt: `tokens` to compute, at `cost` (see `row_cost`); `lengths`
    are the responses', in tokens."""

    group: TrainGroup
    sequences: Sequence[TrainSequence]
    lengths: Sequence[int]
    tokens: int
    cost: float

    @classmethod
    def of(cls, group: TrainGroup, sequences: Sequence[TrainSequence], lengths: Sequence[int] | None = None) -> Part:
        if lengths is None:
            lengths = [len(sequence.token_ids) for sequence in sequences]
        prompt, answered = len(group.prompt_ids), sum(lengths)
        pairs = prompt * (prompt + answered) + sum(map(mul, lengths, lengths))
        return cls(group, sequences, lengths, prompt + answered, row_cost(prompt + answered, pairs))


def merge(parts: Sequence[Part]) -> list[Part]:
    """Parts of one group that met in a row share the prompt again."""
    together: dict[str, list[Part]] = {}
    for part in parts:
        together.setdefault(part.group.group_id, []).append(part)
    return [
        met[0] if len(met) == 1 else Part.of(met[0].group, [sequence for part in met for sequence in part.sequences])
        for met in together.values()
    ]
