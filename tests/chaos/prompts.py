"""The prompts of a chaos run: what becomes of each is known from its id and the seed alone.

So the verdict can name, for every released prompt, the one place where it has to be.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

import numpy as np

from broker import Counts, Sourced
from common.trajectory import Int32Array

Fate = Literal["trainable", "correct", "wrong", "dead", "flaky"]
PROMPT_TOKENS = 3


def fate(seed: int, group_id: str) -> Fate:
    """40 % uninformative, 4 % whose reward always fails, 4 % whose reward fails at the first attempt."""
    draw = zlib.crc32(f"{seed}:{group_id}".encode()) % 100
    bounds: tuple[tuple[int, Fate], ...] = ((20, "correct"), (40, "wrong"), (44, "dead"), (48, "flaky"))
    return next((what for bound, what in bounds if draw < bound), "trainable")


def response_tokens(prompt_ids: Int32Array, index: int) -> Int32Array:
    """Response `index` to a prompt, of 4 to 11 tokens."""
    position = int(prompt_ids[0])
    length = 4 + (position + index) % 8
    return (position * 31 + index * 7 + np.arange(length)).astype(np.int32) % 30_000


def sampling_s(seed: int, group_id: str, median_s: float) -> float:
    """Log-normal: one prompt in twenty takes four times the median."""
    return random.Random(f"{seed}:{group_id}").lognormvariate(0.0, 0.85) * median_s


class Source:
    """Endless: prompt number n says so."""

    counts = Counts(1_000_000)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, position: int) -> Sourced:
        token_ids = np.full(PROMPT_TOKENS, position, dtype=np.int32)
        return Sourced(token_ids, f"prompt {position}", {"answer": str(position)})
