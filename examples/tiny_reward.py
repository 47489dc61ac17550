"""A reward of one's own, in the signature that TRL users know: `f(prompts, completions, **columns) -> list[float]`.

Name it in a configuration as `examples.tiny_reward:contains_digit`, with `correct_at: 1.0` so that dynamic sampling
knows which answers count as correct. Further columns of the data (`answer`, `entry`, ...) arrive as keyword arguments,
one value per completion. Return None for an answer that cannot be judged: that is a data failure, not a reward of 0.
"""

from __future__ import annotations

from typing import Any


def contains_digit(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1.0 for every completion that holds at least one of the digits 0 to 9, else 0.0."""
    return [float(any(character in "0123456789" for character in completion)) for completion in completions]
