"""Packed micro-batches: rows of tokens under a hard limit, balanced over the ranks, each prompt computed once.

A row holds, for every group in it, the prompt once and then responses to it; the attention mask lets each response see
its prompt and itself only, and its positions continue after the prompt, so the row computes what separate sequences
would. Promises: no row is longer than the limit; every rank gets the same number of rows (an idle one gets a row
without targets, so that collectives line up); every sequence with an unmasked token is in exactly one row, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.wire import pack, unpack
from learner.batch import BoolArray, Float64Array, Int64Array, Step
from learner.layout import assign as assign
from learner.layout import layout
from learner.parts import LINEAR_COST as LINEAR_COST
from learner.parts import Part
from learner.parts import row_cost as row_cost

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

    Raises:
        HeadraceError: one prompt with its longest response exceeds `micro_batch_tokens`.
    """
    lock_steps = layout(step, ranks, micro_batch_tokens)
    prompts = step.prompt_of_sequence.astype(np.int32)
    return [[_pack_row(step, lock_step[rank], prompts) for lock_step in lock_steps] for rank in range(ranks)]


def _pack_row(step: Step, parts: Sequence[Part], prompt_of_sequence: NDArray[np.int32]) -> Packed:
    sequences = [sequence for part in parts for sequence in part.sequences]
    # A block is a prompt, or a response to the prompt before it.
    blocks: list[NDArray[Any]] = []
    group_of, starts_at, prompts = [], [], []
    for number, part in enumerate(parts):
        blocks += [part.group.prompt_ids, *(sequence.token_ids for sequence in part.sequences)]
        group_of += [number] * (1 + len(part.sequences))
        starts_at += [0, *[len(part.group.prompt_ids)] * len(part.sequences)]
        prompts += [True, *[False] * len(part.sequences)]
    if not parts:  # a forward pass needs a token, even of an idle rank
        blocks, group_of, starts_at, prompts = [np.zeros(1, np.int32)], [0], [0], [True]
    lengths, is_prompt = np.array([len(block) for block in blocks]), np.array(prompts)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    response_of = np.where(is_prompt, -1, np.cumsum(~is_prompt) - 1)
    in_response = np.repeat(~is_prompt, lengths)
    predict_from = np.flatnonzero(in_response) - 1
    tokens = lengths[~is_prompt]
    # The last prompt token predicts the first token of every response.
    first = np.cumsum(tokens) - tokens
    predict_from[first] = (ends[is_prompt] - 1)[np.array(group_of)[~is_prompt]]
    reward = np.zeros(tokens.sum())
    reward[first + tokens - 1] = [sequence.reward for sequence in sequences]
    index = np.array([sequence.index for sequence in sequences], dtype=np.int64)
    arrays = {
        "input_ids": np.concatenate(blocks),
        "position_ids": np.arange(ends[-1]) - np.repeat(begins - starts_at, lengths),
        "group_of": np.repeat(group_of, lengths),
        "response_of": np.repeat(response_of, lengths),
        "predict_from": predict_from,
        "targets": np.concatenate(blocks)[in_response],
        "behav_logp": _concatenate([sequence.behav_logp for sequence in sequences]),
        "advantage": np.repeat([sequence.advantage for sequence in sequences], tokens),
        "mask": _concatenate([sequence.mask for sequence in sequences]),
        "scale": np.repeat(step.scale_of_sequence[index], tokens),
        "sequence_index": np.repeat(index, tokens),
        "version": _concatenate([sequence.versions for sequence in sequences]),
        "staleness": _concatenate([sequence.staleness for sequence in sequences]),
        "reward": reward,
        "prompt_of_sequence": prompt_of_sequence,
    }
    return Packed(**{name: arrays[name].astype(code) for name, code in _DTYPES.items()})


def _concatenate(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0)


def surviving_tokens(micro_batches: Sequence[Packed], masks: Sequence[BoolArray]) -> Int64Array:
    """Unmasked tokens of every sequence of the step in these micro-batches, (sequences,) int64.

    Add it up over ranks and hand it to `learner.batch.sequence_scale` when rejection has taken tokens from N.
    """
    total = np.zeros(len(micro_batches[0].prompt_of_sequence), dtype=np.int64)
    for packed, mask in zip(micro_batches, masks, strict=True):
        total += np.bincount(packed.sequence_index[mask], minlength=len(total))
    return total
