"""Rewards: the named rules, functions of one's own in worker processes, failures, and what scores mean."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.datafiles import plain
from broker.processes import await_end
from common.config import Config
from common.errors import ConfigError
from common.trajectory import Prompt
from generator.checks import check
from generator.rewards import DataFailure, RewardPool, Score, shape, uninformative
from generator.rewards import math_dapo as dapo
from generator.rewards.rules import judge

DATA = {"type": "dataset", "path": "data.jsonl"}


def _config(reward: dict[str, Any], prompts: dict[str, Any] | None = None, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "model"},
            "prompts": prompts or {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": reward,
            **sections,
        }
    )


def _function(name: str, **options: Any) -> Config:
    return _config({"type": "function", "function": f"reward_functions:{name}", "timeout_s": 30, **options})


def _prompt(**columns: Any) -> Prompt:
    return Prompt("000000007", np.array([1], dtype=np.int32), "Q", columns)


def _judge(reward: str, completions: list[str], **columns: Any) -> list[Any]:
    return judge(_config({"type": reward}))("Q", completions, columns)


# --- named rewards


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("so x is\nAnswer: \\boxed{\\frac{3}{4}}", "\\frac34", True),
        ("Answer: \\text{(B)}", "(B)", True),
        ("Answer: 10,000 dollars", "10000", True),
        ("Answer: \\sqrt2", "\\sqrt{2}", True),
        ("Answer: 5 \\mathrm{th}", "5", True),
        ("Answer: the $y$-axis", "y", True),
        ("Answer: 1,2", "12", True),
        ("Answer: 0.50", "0.5", False),
    ],
)
def test_math_dapo_normalises_as_the_recipe_does(text: str, truth: str, right: bool) -> None:
    assert dapo.is_correct(text, truth) is right


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("The final answer is \\boxed{42}", "42", True),
        ("**Answer:** $\\frac{1}{2}$", "0.5", True),
        ("Answer: $\\dfrac{1}{2}$", "\\frac{1}{2}", True),
        ("It is 41.", "42", False),
        ("no number here", "42", False),
        ("\\boxed{x^2+2x+1}", "$(x+1)^2$", True),
    ],
)
def test_math_verify_forgives_form_and_not_value(text: str, truth: str, right: bool) -> None:
    assert [verdict[:2] for verdict in _judge("math_verify", [text], answer=truth)] == [(float(right), right)]


def test_math_verify_tells_equal_numbers_as_one_answer() -> None:
    texts = ["$\\frac{1}{4}$", "Answer: 0.25", "so \\boxed{042}", "nothing", "Answer: $1 + 1$", "\\boxed{2.0}"]
    answers = [verdict[2] for verdict in _judge("math_verify", texts, answer="2")]
    assert answers == ["1/4", "1/4", "42", None, "2", "2"]


def test_maths_rewards_take_the_first_column_that_holds_an_answer() -> None:
    columns = {"ground_truth": None, "answer": "1", "solution": "2"}
    assert _judge("math_dapo", ["Answer: 1", "Answer: 2"], **columns) == [(1.0, True, "1"), (-1.0, False, "2")]
    with pytest.raises(KeyError, match="ground_truth, answer, solution"):
        _judge("math_dapo", ["Answer: 1"], other="x")


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi", "countdown", "basic_arithmetic", "letter_counting"])
def test_reasoning_gym_gives_full_score_to_its_own_answers_after_the_wire(task: str) -> None:
    import reasoning_gym

    entry = plain(reasoning_gym.create_dataset(task, size=1, seed=5)[0])
    verdicts = _judge("reasoning_gym", [f" {entry['answer']}\n", "surely wrong"], entry=entry, task=task)
    assert verdicts[0] == (1.0, True, entry["answer"].strip())
    assert verdicts[1][1] is False


@pytest.mark.parametrize(
    ("completion", "right"),
    [("3", True), ("4 - 1 = 3.", True), ("3, no: 4", False), ("4 - 1 = -3", False), ("none", False), ("", False)],
)
def test_reasoning_gym_extract_takes_the_last_match(completion: str, right: bool) -> None:
    entry = {"question": "4 - 1 =", "answer": "3", "metadata": {}}
    config = _config({"type": "reasoning_gym", "extract": r"-?\d+"})
    verdict = judge(config)("", [completion], {"entry": entry, "task": "chain_sum"})[0]
    assert verdict is not None and verdict[1] is right


# --- worker processes


@pytest.fixture
async def pool() -> AsyncIterator[Callable[[Config], RewardPool]]:
    pools: list[RewardPool] = []

    def make(config: Config) -> RewardPool:
        pools.append(RewardPool(config))
        pools[-1].start()
        return pools[-1]

    yield make
    for made in pools:
        made.close()


@pytest.mark.parametrize("name", ["length", "length_async"])
async def test_function_reward_sync_or_async_scores_every_completion(pool: Any, name: str) -> None:
    scores = await pool(_function(name, correct_at=2.0)).score(_prompt(), ["a", "bb", "ccc"])
    assert scores == [Score(1.0, False), Score(2.0, True), Score(3.0, True)]


async def test_function_reward_without_correct_at_leaves_correctness_open(pool: Any) -> None:
    assert await pool(_function("length")).score(_prompt(), ["a"]) == [Score(1.0, None)]


async def test_function_reward_gets_prompt_and_columns_once_per_completion(pool: Any) -> None:
    scores = await pool(_function("echo")).score(_prompt(answer="a", other=[1]), ["x", "y"])
    assert [score.reward for score in scores] == [1.0, 2.0]


async def test_function_reward_without_keyword_arguments_gets_the_columns_it_names(pool: Any) -> None:
    scores = await pool(_function("matches")).score(_prompt(answer="a", other=1), ["a", "b"])
    assert [score.reward for score in scores] == [1.0, 0.0]


async def test_each_failure_is_a_data_failure_and_the_pool_goes_on(pool: Any) -> None:
    rewards = pool(_function("fails"))
    expected = {
        "none": "completion 0: returned None",
        "nan": "completion 0: returned nan",
        "inf": "completion 1: returned inf",
        "short": "returned 1 rewards for 2 completions",
        "raise": "ZeroDivisionError: by the reward",
        "exit": "its worker process ended",
    }
    for what, reason in expected.items():
        with pytest.raises(DataFailure, match=f"prompt 000000007.*{reason}"):
            await rewards.score(_prompt(), [what, "y"])
    assert await rewards.score(_prompt(), ["fine", "y"]) == [Score(1.0, None)] * 2


async def test_hung_worker_is_killed_at_the_deadline_and_replaced(pool: Any, tmp_path: Path) -> None:
    rewards, pid_file = pool(_function("fails", timeout_s=0.5)), tmp_path / "pid"
    with pytest.raises(DataFailure, match=r"no result within reward\.timeout_s \(0\.5 s\)"):
        await rewards.score(_prompt(pid_file=str(pid_file)), ["hang", "y"])
    assert await_end([int(pid_file.read_text())], 10.0)
    assert await rewards.score(_prompt(), ["fine", "y"]) == [Score(1.0, None)] * 2


async def test_reward_that_does_not_import_in_the_worker_is_no_fault_of_the_group(pool: Any) -> None:
    with pytest.raises(ConfigError, match="has no 'missing'"):
        await pool(_function("missing")).score(_prompt(), ["x"])


async def test_close_ends_a_worker_that_hangs(tmp_path: Path) -> None:
    rewards, pid_file = RewardPool(_function("fails")), tmp_path / "pid"
    os.mkfifo(pid_file)
    rewards.start()
    task = asyncio.create_task(rewards.score(_prompt(pid_file=str(pid_file)), ["hang"]))
    pid = int(await asyncio.to_thread(pid_file.read_text))
    await asyncio.to_thread(rewards.close)
    assert await_end([pid], 10.0)
    with pytest.raises(asyncio.CancelledError):
        await task


# --- what scores mean


@pytest.mark.parametrize(
    ("correct", "rewards", "kind"),
    [
        ([True, True], [1.0, 0.5], "correct"),
        ([False, False], [0.0, 0.3], "wrong"),
        ([True, False], [1.0, 0.0], None),
        ([None, None], [0.7, 0.7], "equal"),
        ([None, None], [0.7, 0.6], None),
    ],
)
def test_uninformative_judges_correctness_and_only_without_it_rewards(
    correct: list[bool | None], rewards: list[float], kind: str | None
) -> None:
    assert uninformative([Score(r, c) for r, c in zip(rewards, correct, strict=True)]) == kind


def test_overlong_punishment_is_off_by_default() -> None:
    assert shape([Score(1.0, True)], [10**6], _config({"type": "math_dapo"})) == [1.0]


# --- start-up checks


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("no_such_module:f", "does not import: ModuleNotFoundError"),
        ("reward_functions:nothing", "has no 'nothing'"),
        ("reward_functions:NOT_A_FUNCTION", "is a int; expected a function"),
        ("reward_functions:no_completions", r"expected \(prompts, completions, \*\*columns\)"),
    ],
)
def test_check_names_a_reward_that_cannot_be_used(function: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function: '{function}'.*{reason}"):
        check(_config({"type": "function", "function": function}))


def test_check_accepts_a_good_reward() -> None:
    check(_function("length"))
    check(_config({"type": "reasoning_gym"}))


def test_check_refuses_a_maths_reward_without_an_answer_column(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Q", "level": 1}\n')
    prompts = {"type": "dataset", "path": str(path)}
    with pytest.raises(ConfigError, match=r"reward\.type: 'math_dapo' needs the right answer.*prompt, level"):
        check(_config({"type": "math_dapo"}, prompts))
    path.write_text('{"prompt": "Q", "reward_model": {"ground_truth": "1", "style": "rule"}}\n')
    check(_config({"type": "math_dapo"}, prompts))


def test_check_refuses_evaluation_prompts_that_the_reward_cannot_score() -> None:
    with pytest.raises(ConfigError, match=r"eval\.prompts\.type"):
        check(_config({"type": "reasoning_gym"}, eval={"prompts": DATA}))
