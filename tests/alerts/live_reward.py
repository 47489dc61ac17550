"""A reward that fails whenever a file says so: HEADRACE_TEST_FAILS names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from examples.tiny_reward import contains_digit


def score(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    if Path(os.environ["HEADRACE_TEST_FAILS"]).exists():
        raise ValueError("told to fail")
    return contains_digit(prompts, completions, **columns)
