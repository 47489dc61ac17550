"""Worker processes that score groups, each call with a deadline.

Promises: a worker imports the reward once, before its first group; one that misses the deadline is killed and replaced;
whatever goes wrong with a group is a `DataFailure` that says what, never a reward; a reward that does not load in this
process's workers is no fault of a group and a `ConfigError`; no worker outlives its parent.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import wait
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from common.config import Config
from common.errors import ConfigError
from common.trajectory import Prompt
from generator.rewards.rules import Judge, Verdict, judge
from generator.rewards.scores import DataFailure, Score

CLOSE_TIMEOUT_S = 5.0

_judge: Judge | ConfigError | None = None  # of this worker process; set once by _initialise


def _initialise(config: Config) -> None:
    """In the worker, before its first call."""
    global _judge
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _judge = judge(config)
    except ConfigError as error:  # told to every caller: a pool whose initialiser fails would wait for ever
        _judge = error
    except Exception as error:
        _judge = ConfigError(f"reward {config.reward.type} does not load: {type(error).__name__}: {error!s:.300}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)


def _score(prompt: str, completions: list[str], columns: Mapping[str, Any]) -> list[Verdict]:
    assert _judge is not None
    if isinstance(_judge, ConfigError):
        raise _judge
    return _judge(prompt, completions, columns)


def _ready() -> None:
    """What a worker does first: nothing, after its imports."""


class RewardPool:
    """Scores groups with the configured reward in `reward.workers` processes.

    `start` returns at once (the workers import the reward meanwhile); `close` ends the workers, running or not.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._name = getattr(config.reward, "function", config.reward.type)
        self._pool: ProcessPool | None = None
        self._pending: set[ProcessFuture] = set()

    def start(self) -> None:
        self._pool = ProcessPool(
            max_workers=self._config.reward.workers,
            initializer=_initialise,
            initargs=(self._config,),
            context=multiprocessing.get_context("spawn"),
        )
        self._pool.schedule(_ready)

    def close(self) -> None:
        if self._pool is not None:
            for future in list(self._pending):  # stopping alone would leave them pending for ever
                future.cancel()
            self._pool.stop()
            self._pool.join(CLOSE_TIMEOUT_S)
            self._pool = None

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
        """Raw scores, one per completion.

        Raises:
            DataFailure: the reward raised, missed its deadline, ended its worker, or returned None, NaN, an infinity
                or a wrong number of rewards.
            ConfigError: the reward does not load here, whatever the group; elsewhere it may.
            asyncio.CancelledError: the pool was closed meanwhile.
        """
        if self._pool is None:
            raise RuntimeError("RewardPool.score before start or after close")
        future: ProcessFuture = self._pool.schedule(
            _score,
            args=(prompt.text, list(completions), prompt.columns),
            timeout=self._config.reward.timeout_s,
        )
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        where = f"reward {self._name} on prompt {prompt.group_id}"
        try:
            verdicts = await asyncio.wrap_future(future)
        except (TimeoutError, FutureTimeoutError):
            limit = self._config.reward.timeout_s
            raise DataFailure(f"{where}: no result within reward.timeout_s ({limit} s)", "reward_timeout") from None
        except ProcessExpired as error:
            raise DataFailure(f"{where}: its worker process ended ({error})", "reward_died") from None
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise DataFailure(f"{where}: {type(error).__name__}: {error!s:.300}", "reward_raised") from error
        if len(verdicts) != len(completions):
            text = f"{where}: returned {len(verdicts)} rewards for {len(completions)} completions"
            raise DataFailure(text, "reward_value")
        return [_checked(verdict, f"{where}, completion {i}") for i, verdict in enumerate(verdicts)]


def _checked(verdict: Verdict, where: str) -> Score:
    if verdict is None:
        raise DataFailure(f"{where}: returned None", "reward_value")
    reward, correct, answer = verdict
    if not math.isfinite(reward):
        raise DataFailure(f"{where}: returned {reward}; expected a finite number", "reward_value")
    return Score(reward, correct, answer)
