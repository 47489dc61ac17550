"""Rewards that `test_rewards.py` runs in worker processes: good ones and all the ways to fail."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def length_async(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def matches(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def echo(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    assert prompts == ["Q"] * 2 and columns["answer"] == ["a"] * 2 and columns["other"] == [[1]] * 2
    return [1.0, 2.0]


def fails(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """As the first completion says."""
    what = completions[0]
    if what == "raise":
        raise ZeroDivisionError("by the reward")
    if what == "hang":
        Path(columns["pid_file"][0]).write_text(str(os.getpid()))
        while True:
            time.sleep(60)
    if what == "exit":
        os.kill(os.getpid(), 9)
    return {"none": [None, 1.0], "nan": [float("nan"), 1.0], "inf": [1.0, float("inf")], "short": [1.0]}.get(
        what, [1.0] * len(completions)
    )


def no_completions(prompts: list[str], answers: list[str]) -> list[float]:
    return []


NOT_A_FUNCTION = 3
