"""The rewards, as they run inside a worker process: `judge` makes one from the configuration.

A judge takes one group (prompt text, completions, columns) and returns (reward, correct, answer) per completion, or
None for one that cannot be judged. `answer` is what the rule read as the final answer; None: it found none, or the
reward does not tell (`tells_answers`). A judge may raise; `generator.rewards.pool` turns all that into a data failure.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from common.config import Config, FunctionReward, NamedReward, ReasoningGymPrompts, ReasoningGymReward
from common.errors import ConfigError
from common.trajectory import TRUTH_COLUMNS, find_truth
from generator.rewards import math_dapo

Verdict = tuple[float, bool | None, str | None] | None
Judge = Callable[[str, list[str], Mapping[str, Any]], list[Verdict]]

# These tasks compare boards as nested tuples, which arrive from the wire as lists.
_TUPLE_TASKS = {"arc_agi", "rearc"}
# A score this close to 1 is a full one: some tasks multiply rounded parts.
_FULL_SCORE = 1 - 1e-6


def judge(config: Config) -> Judge:
    """The configured reward.

    Raises:
        ConfigError: the function does not import or is not callable, or the package it needs is missing.
    """
    if isinstance(config.reward, FunctionReward):
        return functools.partial(_function, load_function(config.reward.function), config.reward.correct_at)
    return _named(config.reward, config)


def tells_answers(config: Config) -> bool:
    """Whether the configured reward says which final answer it saw: a function returns numbers only."""
    return not isinstance(config.reward, FunctionReward)


def _named(reward: NamedReward | ReasoningGymReward, config: Config) -> Judge:
    try:
        if isinstance(reward, ReasoningGymReward):
            assert isinstance(config.prompts, ReasoningGymPrompts)  # the configuration refuses other combinations
            scorer(config.prompts.task)  # the import, and an unknown task, before the first group
            return functools.partial(_reasoning_gym, re.compile(reward.extract) if reward.extract else None)
        if reward.type == "math_verify":
            return _math_verify()
    except ImportError as error:
        raise ConfigError(f"reward.type: {reward.type!r} needs a package that does not import: {error}") from None
    return _math_dapo


def load_function(dotted: str) -> Callable[..., Any]:
    """The object behind `package.module:function`; the current directory is searched as well.

    Raises:
        ConfigError: with the dotted path and the reason.
    """
    module_name, _, name = dotted.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(
            f"reward.function: {dotted!r}: module {module_name!r} does not import: {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"reward.function: {dotted!r}: {found!r:.80} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"reward.function: {dotted!r} is a {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function


def truth(columns: Mapping[str, Any]) -> str:
    """The right answer. KeyError where no column of `TRUTH_COLUMNS` holds one."""
    found = find_truth(columns)
    if found is None:
        names = ", ".join(TRUTH_COLUMNS)
        raise KeyError(f"no right answer: expected a column {names}; the columns are {list(columns)}")
    return found


def _math_dapo(_: str, completions: list[str], columns: Mapping[str, Any]) -> list[Verdict]:
    right = [(math_dapo.is_correct(text, truth(columns)), math_dapo.predicted(text)) for text in completions]
    return [(1.0 if correct else -1.0, correct, answer or None) for correct, answer in right]


def _math_verify() -> Judge:
    from math_verify import parse, verify

    # Its own timeouts turn into "wrong"; ours, around the whole call, into a data failure. It warns about the lack.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(_: str, completions: list[str], columns: Mapping[str, Any]) -> list[Verdict]:
        text = truth(columns)
        marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        gold = parse(text if marked else f"${text}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math_verify cannot read the right answer {text!r:.80}")
        parsed = [parse(completion, parsing_timeout=None) for completion in completions]
        right = [bool(verify(gold, found, timeout_seconds=None)) for found in parsed]
        # Whatever equals the right answer is one answer, however it was written.
        read = [_shown(gold if correct else found) for correct, found in zip(right, parsed, strict=True)]
        return [(float(correct), correct, answer) for correct, answer in zip(right, read, strict=True)]

    return score


def _shown(parsed: list[Any]) -> str | None:
    """What math_verify read, as text: "1/2" for "\\frac{1}{2}" and for "0.5"; expressions are not evaluated."""
    from sympy import Float, Rational  # type: ignore[import-untyped]

    try:
        found = parsed[0] if parsed else None
        return None if found is None else str(Rational(str(found)) if isinstance(found, Float) else found)
    except Exception:  # an expression that cannot be printed costs its vote, not the group's rewards
        return None


@functools.cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The scoring function of a reasoning-gym task. Raises ConfigError where it cannot be made."""
    from reasoning_gym import get_score_answer_fn

    try:
        function: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    except Exception as error:  # tasks check their options with assertions
        raise ConfigError(f"reward.type: reasoning_gym cannot score task {task!r}: {error}") from None
    return function


def _reasoning_gym(
    pattern: re.Pattern[str] | None, _: str, completions: list[str], columns: Mapping[str, Any]
) -> list[Verdict]:
    task, entry = columns["task"], dict(columns["entry"])
    if task in _TUPLE_TASKS:
        entry["metadata"] = {name: _tuples(value) for name, value in entry["metadata"].items()}
    answers = [extracted(text, pattern) for text in completions]
    scores = [float(scorer(task)(answer, entry)) for answer in answers]
    return [(value, value >= _FULL_SCORE, answer or None) for value, answer in zip(scores, answers, strict=True)]


def extracted(completion: str, pattern: re.Pattern[str] | None) -> str:
    """The answer in a completion: the last match of `pattern` ("" if there is none), or all of it."""
    if pattern is None:
        return completion.strip()
    matches = [match.group() for match in pattern.finditer(completion)]
    return matches[-1].strip() if matches else ""


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _function(
    function: Callable[..., Any],
    correct_at: float | None,
    prompt: str,
    completions: list[str],
    columns: Mapping[str, Any],
) -> list[Verdict]:
    """Call a reward of the user's own: every column is repeated per completion, as TRL does."""
    count = len(completions)
    arguments = {name: [value] * count for name, value in columns.items()}
    arguments.update(prompts=[prompt] * count, completions=list(completions))
    result = function(**_accepted(function, arguments))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    values = list(result)
    if len(values) != count:
        raise ValueError(f"returned {len(values)} rewards for {count} completions")
    floats = [None if value is None else float(value) for value in values]
    return [None if v is None else (v, None if correct_at is None else v >= correct_at, None) for v in floats]


async def _awaited(value: Any) -> Any:
    return await value


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A function without `**columns` gets those columns that it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
