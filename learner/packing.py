"""Packed micro-batches: rows of tokens under a hard limit, balanced over the ranks, each prompt computed once.

A row holds, for every group in it, the prompt once and then responses to it; the attention mask lets each response see
its prompt and itself only, and its positions continue after the prompt, so the row computes what separate sequences
would. Promises: no row is longer than the limit; every rank gets the same number of rows (an idle one gets a row
without targets, so that collectives line up); every sequence with an unmasked token is in exactly one row, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import HeadraceError, WireError
from common.wire import pack, unpack
from learner.balance import EFFORT, deal, fills, longest_first, spread
from learner.batch import BoolArray, Float64Array, Int64Array, Step, TrainGroup, TrainSequence

# Cost of a row of T tokens: T^2 for attention, whose dense mask spans the row, and T times this for the rest. About
# right for a 7B model (6 x hidden size), and only the shape matters: rows of a lock-step should cost the same.
LINEAR_COST = 24_576.0

_DTYPES: dict[str, str] = {
    "input_ids": "<i4", "position_ids": "<i4", "group_of": "<i4", "response_of": "<i4",
    "predict_from": "<i4", "targets": "<i4", "behav_logp": "<f4", "advantage": "<f8", "mask": "|b1", "scale": "<f8",
    "sequence_index": "<i4", "version": "<i4", "staleness": "<i4", "reward": "<f8", "prompt_of_sequence": "<i4",
}  # fmt: skip
_ROW = ("input_ids", "position_ids", "group_of", "response_of")
_TARGETS = (
    "predict_from", "targets", "behav_logp", "advantage", "mask", "scale", "sequence_index", "version", "staleness",
    "reward",
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One micro-batch of one rank: T tokens in a row, R of which are response tokens to be trained on.

    All are one-dimensional arrays.

    Attributes:
        input_ids: (T,) int32.
        position_ids: (T,) int32; a response continues after its prompt.
        group_of: (T,) int32, which prompt of the row.
        response_of: (T,) int32, which response of the row; -1 for prompt tokens.
        predict_from: (R,) int32, index in the row of the token whose hidden state predicts the target.
        targets: (R,) int32, token ids.
        behav_logp: (R,) float32, nats.
        advantage: (R,) float64; 0 where a critic is to estimate it.
        mask: (R,) bool, True where the token trains.
        scale: (R,) float64, weight of the token's loss (`learner.batch.sequence_scale`).
        sequence_index: (R,) int32, response of the token within the optimizer step.
        version: (R,) int32, policy version that sampled the token.
        staleness: (R,) int32, its distance from the learner's at the start of the batch, in versions.
        reward: (R,) float64, the response's (shaped) at its last token, 0 at the others.
        prompt_of_sequence: (sequences of the whole step,) int32, for counting N again after rejection.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    group_of: NDArray[np.int32]
    response_of: NDArray[np.int32]
    predict_from: NDArray[np.int32]
    targets: NDArray[np.int32]
    behav_logp: NDArray[np.float32]
    advantage: Float64Array
    mask: BoolArray
    scale: Float64Array
    sequence_index: NDArray[np.int32]
    version: NDArray[np.int32]
    staleness: NDArray[np.int32]
    reward: Float64Array
    prompt_of_sequence: NDArray[np.int32]

    def to_bytes(self) -> bytes:
        """A msgpack message with the arrays as raw little-endian bytes."""
        return pack("packed", {name: getattr(self, name).astype(code).tobytes() for name, code in _DTYPES.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Packed:
        """The inverse of `to_bytes`; the arrays are read-only.

        Raises:
            WireError: not such a message, an array is missing or its length does not fit the others.
        """
        message = unpack(data, "packed")
        arrays = {name: _array(message.get(name), name, code) for name, code in _DTYPES.items()}
        for names in (_ROW, _TARGETS):
            lengths = {name: len(arrays[name]) for name in names}
            if len(set(lengths.values())) != 1:
                raise WireError(f"packed micro-batch: lengths {lengths}; expected equal ones")
        return cls(**arrays)


def _array(value: Any, name: str, code: str) -> NDArray[Any]:
    if not isinstance(value, bytes) or len(value) % np.dtype(code).itemsize:
        what = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise WireError(f"packed micro-batch: {name} is {what}; expected whole values of type {code}")
    return np.frombuffer(value, dtype=code)


def plan(step: Step, ranks: int, micro_batch_tokens: int) -> list[list[Packed]]:
    """The micro-batches of every rank, as many for each; micro-batches at the same place run in lock-step.

    Whole groups share their prompt best but balance worst, so groups are cut at several sizes (halves of the limit, and
    on) and the plan whose slowest ranks cost least in sum is taken; a repeated prompt counts as the tokens it costs.
    Rows are dealt longest first; at the best size a search tries to do better.

    Raises:
        HeadraceError: one prompt with its longest response exceeds `micro_batch_tokens`.
    """
    longest = max((len(g.prompt_ids) + s.tokens for g in step.groups for s in _trained(step, g)), default=1)
    if longest > micro_batch_tokens:
        raise HeadraceError(
            f"a prompt with one response has {longest} tokens, more than learner.micro_batch_tokens "
            f"({micro_batch_tokens}); use at least {longest}"
        )
    sizes = [micro_batch_tokens]
    while sizes[-1] // 2 >= longest:
        sizes.append(sizes[-1] // 2)
    plans = {size: _cut_and_assign(step, size, ranks, micro_batch_tokens, 0) for size in sizes}
    size = min(sizes, key=lambda size: plans[size][0])
    best = min(plans[size], _cut_and_assign(step, size, ranks, micro_batch_tokens, EFFORT), key=lambda plan: plan[0])[1]
    prompts = step.prompt_of_sequence.astype(np.int32)
    return [[_pack_row(step, lock_step[rank], prompts) for lock_step in best] for rank in range(ranks)]


def _cut_and_assign(
    step: Step, size: int, ranks: int, limit: int, effort: int
) -> tuple[float, list[list[list[_Part]]]]:
    """Cost of the slowest ranks, and the parts of every row of every lock-step, with groups cut at `size`."""
    parts = [part for group in step.groups for part in _cut(step, group, size)]
    bins = assign([part.tokens for part in parts], ranks, limit, effort)
    rows = [[_merge([parts[i] for i in row]) for row in lock_step] for lock_step in bins]
    return sum(max(row_cost(sum(part.tokens for part in row)) for row in lock_step) for lock_step in rows), rows


def row_cost(tokens: int) -> float:
    """Cost of forward and backward over a row, in units without meaning."""
    return LINEAR_COST * tokens + float(tokens) ** 2


def assign(sizes: Sequence[int], ranks: int, limit: int, effort: int = EFFORT) -> list[list[list[int]]]:
    """Items spread over all bins; then bins in order of their fill, dealt a rank's worth at a time.

    Args:
        sizes: tokens of every item, none above `limit`.
        ranks: bins that run in lock-step.
        limit: tokens a bin may hold; hard.
        effort: of the search (`learner.balance.spread`).

    Returns:
        lock-steps, each of `ranks` bins, each a list of item indices; as few lock-steps as longest-first fits into.
    """
    order, lock_steps = longest_first(sizes), max(1, -(-sum(sizes) // (limit * ranks)))
    while max(fills(deal(order, sizes, lock_steps * ranks), sizes)) > limit:
        lock_steps += 1
    bins = spread(sizes, lock_steps * ranks, effort)
    bins.sort(key=lambda items: -sum(sizes[item] for item in items))
    return [bins[first : first + ranks] for first in range(0, len(bins), ranks)]


@dataclass(frozen=True)
class _Part:
    """Some responses of a group, which cost their prompt once."""

    group: TrainGroup
    sequences: tuple[TrainSequence, ...]

    @property
    def tokens(self) -> int:
        return len(self.group.prompt_ids) + sum(sequence.tokens for sequence in self.sequences)


def _trained(step: Step, group: TrainGroup) -> list[TrainSequence]:
    """Sequences with an unmasked token; the others would be computed for nothing."""
    return [sequence for sequence in group.sequences if step.tokens_of_sequence[sequence.index] > 0]


def _cut(step: Step, group: TrainGroup, size: int) -> list[_Part]:
    """The group's responses in parts of at most `size` tokens, prompt included; as even as longest-first makes them."""
    sequences = _trained(step, group)
    if not sequences:
        return []
    bins = assign([sequence.tokens for sequence in sequences], 1, size - len(group.prompt_ids), effort=0)
    return [_Part(group, tuple(sequences[i] for i in sorted(items))) for [items] in bins if items]


def _merge(parts: Sequence[_Part]) -> list[_Part]:
    """Parts of one group that met in a row share the prompt again."""
    together: dict[str, list[TrainSequence]] = {}
    groups = {part.group.group_id: part.group for part in parts}
    for part in parts:
        together.setdefault(part.group.group_id, []).extend(part.sequences)
    return [_Part(groups[group_id], tuple(sequences)) for group_id, sequences in together.items()]


def _pack_row(step: Step, parts: Sequence[_Part], prompt_of_sequence: NDArray[np.int32]) -> Packed:
    sequences = [sequence for part in parts for sequence in part.sequences]
    row: dict[str, list[Any]] = {name: [] for name in (*_ROW, "predict_from")}
    at = response = 0
    for index, part in enumerate(parts):
        prompt = len(part.group.prompt_ids)
        prompt_end = at + prompt - 1
        blocks: list[tuple[Any, int, int]] = [(part.group.prompt_ids, 0, -1)]
        for sequence in part.sequences:
            blocks.append((sequence.token_ids, prompt, response))
            response += 1
        for token_ids, position, owner in blocks:
            length = len(token_ids)
            row["input_ids"].append(token_ids)
            row["position_ids"].append(np.arange(position, position + length))
            row["group_of"].append(np.full(length, index))
            row["response_of"].append(np.full(length, owner))
            if owner >= 0:  # the last prompt token predicts the first token of every response
                row["predict_from"].append(np.r_[prompt_end, at : at + length - 1])
            at += length
    if not parts:  # a forward pass needs a token, even of an idle rank
        for name in _ROW:
            row[name].append(np.array([-1 if name == "response_of" else 0]))

    def per_token(value: Callable[[TrainSequence], Any]) -> list[Any]:
        return [np.full(sequence.tokens, value(sequence)) for sequence in sequences]

    arrays = {
        **row,
        "targets": [sequence.token_ids for sequence in sequences],
        "behav_logp": [sequence.behav_logp for sequence in sequences],
        "advantage": per_token(lambda sequence: sequence.advantage),
        "mask": [sequence.mask for sequence in sequences],
        "scale": per_token(lambda sequence: step.scale_of_sequence[sequence.index]),
        "sequence_index": per_token(lambda sequence: sequence.index),
        "version": [sequence.versions for sequence in sequences],
        "staleness": [sequence.staleness for sequence in sequences],
        "reward": [np.r_[np.zeros(sequence.tokens - 1), sequence.reward] for sequence in sequences],
        "prompt_of_sequence": [prompt_of_sequence],
    }
    return Packed(**{name: _concatenate(arrays[name], code) for name, code in _DTYPES.items()})


def _concatenate(pieces: Sequence[NDArray[Any]], code: str) -> NDArray[Any]:
    return np.concatenate(pieces).astype(code) if pieces else np.empty(0, dtype=code)


def surviving_tokens(micro_batches: Sequence[Packed], masks: Sequence[BoolArray]) -> Int64Array:
    """Unmasked tokens of every sequence of the step in these micro-batches, (sequences,) int64.

    Add it up over ranks and hand it to `learner.batch.sequence_scale` when rejection has taken tokens from N.
    """
    total = np.zeros(len(micro_batches[0].prompt_of_sequence), dtype=np.int64)
    for packed, mask in zip(micro_batches, masks, strict=True):
        total += np.bincount(packed.sequence_index[mask], minlength=len(total))
    return total
