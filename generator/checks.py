"""Start-up checks of the generator room that load no model and no vLLM: can the reward be used with these prompts?"""

from __future__ import annotations

import inspect

from broker import datafiles
from common.config import Config, DatasetPrompts, FunctionReward, ReasoningGymPrompts
from common.errors import ConfigError
from common.trajectory import TRUTH_COLUMNS
from generator.rewards.rules import judge, load_function, scorer


def check(config: Config) -> None:
    """Raises ConfigError where the reward does not import, has another signature, or finds no answer in the data."""
    judge(config)
    _check_eval(config)
    if isinstance(config.reward, FunctionReward):
        _check_signature(config.reward.function)
    elif config.reward.type in ("math_dapo", "math_verify"):
        for prompts in (config.prompts, *((config.eval.prompts,) if config.eval else ())):
            if isinstance(prompts, DatasetPrompts):
                _check_truth(config.reward.type, prompts)


def _check_truth(reward: str, prompts: DatasetPrompts) -> None:
    columns = datafiles.columns_of(prompts)
    if "reward_model" not in columns and not set(TRUTH_COLUMNS) & set(columns):
        raise ConfigError(
            f"reward.type: {reward!r} needs the right answer in a column {', '.join(TRUTH_COLUMNS)} or reward_model; "
            f"{prompts.path!r} has {', '.join(columns)}"
        )


def _check_eval(config: Config) -> None:
    if config.reward.type == "reasoning_gym" and config.eval is not None:
        if not isinstance(config.eval.prompts, ReasoningGymPrompts):
            raise ConfigError(
                f"eval.prompts.type: {config.eval.prompts.type!r} cannot be scored by reward.type 'reasoning_gym'; use "
                "'reasoning_gym' for both, or another reward"
            )
        scorer(config.eval.prompts.task)


def _check_signature(dotted: str) -> None:
    """A function that takes the completions under another name would fail on every group."""
    try:
        parameters = inspect.signature(load_function(dotted)).parameters
    except ValueError:  # built in: nothing to inspect
        return
    if "completions" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"reward.function: {dotted!r} takes ({', '.join(parameters)}); expected (prompts, completions, **columns)"
        )
