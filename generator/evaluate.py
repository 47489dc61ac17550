"""Held-out evaluation: k samples per problem, judged by the run's reward, as metrics with intervals.

Sampling is one injected function (`Sampler`), so that everything but vLLM can be used and tested without it. A response
that cannot be sampled or judged is a failure: not correct, and counted apart.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broker import Source, open_source
from common.config import Config, DatasetPrompts, EvalConfig, FunctionReward, PromptsConfig
from common.errors import ConfigError
from common.evaluation import LEVEL, RESAMPLES, Estimate, Sample, summarise
from common.trajectory import Prompt, find_truth
from generator.engine import Engine, Sampled, engine_seed
from generator.rewards import DataFailure, RewardPool, Score
from generator.rewards.rules import tells_answers

# (prompt, seed) -> its samples, `eval.samples` of them. May raise DataFailure.
Sampler = Callable[[Prompt, int], Awaitable[list[Sampled]]]


@dataclass(frozen=True)
class Answer:
    """One response. `reward` and `correct` are None where it could not be judged; `answer` is what the reward read."""

    prompt: str
    completion: str
    reward: float | None
    correct: bool | None
    answer: str | None
    truncated: bool
    tokens: int

    def sample(self) -> Sample:
        return Sample(bool(self.correct), self.answer, self.truncated, self.tokens, failed=self.reward is None)


@dataclass(frozen=True)
class Problem:
    """Counts of one problem's samples; `answers` maps each answer read to how often it was given, most frequent first.

    `tokens` is the mean length of a response.
    """

    prompt: str
    ground_truth: str | None
    samples: int
    correct: int
    answers: dict[str, int]
    truncated: int
    tokens: float
    failures: int


@dataclass(frozen=True)
class EvalResult:
    """What `headrace eval` measured.

    `metrics` holds every number with its interval (see `common.evaluation`), by name; `no_majority` says why the
    majority vote is not among them. `accuracy` is avg@k, `standard_error` is over problems, `truncated` is a share.
    `rows`, `merged` and `left_out` tell what became of the source's rows; `prompts` is the number of problems.
    """

    model: str
    source: str
    reward: str
    rows: int
    merged: int
    left_out: int
    prompts: int
    samples: int
    sampling: dict[str, Any]
    bootstrap: dict[str, Any]
    accuracy: float
    standard_error: float
    truncated: float
    failures: int
    first_failure: str | None
    metrics: dict[str, Estimate]
    no_majority: str | None
    problems: tuple[Problem, ...]
    answers: tuple[Answer, ...]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def evaluation_source(config: Config) -> Source:
    """The problems of the `eval` section, in their order.

    Raises:
        ConfigError: there is no such section, the reward cannot tell right from wrong, or the prompts cannot be used.
    """
    if config.eval is None:
        raise ConfigError("eval: missing; `headrace eval` needs a section eval with prompts to evaluate on")
    if isinstance(config.reward, FunctionReward) and config.reward.correct_at is None:
        raise ConfigError("reward.correct_at: null, so that no answer counts as correct; evaluation needs a number")
    return open_source(config.eval.prompts, config, shuffle=False)


def described(config: Config, source: Source) -> str:
    """What is evaluated on, for people: "aime.parquet: 96 rows, 3 problems (93 rows merged), 32 samples each"."""
    settings, counts = _settings(config), source.counts
    text = f"{source_name(settings.prompts)}: {counts.rows} rows, {len(source)} problems ({counts.merged} rows merged)"
    if counts.left_out:
        text += f", {counts.left_out} longer than {config.sampling.max_prompt_tokens} tokens left out"
    if settings.limit < len(source):
        text += f", the first {settings.limit} of them"
    return f"{text}, {settings.samples} samples each"


def source_name(prompts: PromptsConfig) -> str:
    return prompts.path if isinstance(prompts, DatasetPrompts) else prompts.task


async def run_evaluation(config: Config, source: Source, done: Callable[[], None]) -> EvalResult:
    """Sample the problems of `source` with `config.model` in a vLLM engine of its own, and judge them.

    Args:
        config: the run's configuration, with an `eval` section.
        source: as `evaluation_source` gives it.
        done: called after each problem.

    Raises:
        EngineError: vLLM did not start, or died.
    """
    settings = _settings(config)
    engine = Engine(config, "eval", initial_version=0)

    async def sample(prompt: Prompt, seed: int) -> list[Sampled]:
        return await engine.sample(
            prompt.group_id,
            prompt.token_ids,
            settings.samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_response_tokens,
            seed=seed,
        )

    try:
        await engine.start()
        return await evaluate(config, source, sample, done)
    finally:
        await engine.close()


async def evaluate(config: Config, source: Source, sample: Sampler, done: Callable[[], None]) -> EvalResult:
    """As `run_evaluation`, with responses from `sample`; every problem is asked for at once."""
    settings = _settings(config)
    seed = config.run.seed if settings.seed is None else settings.seed
    failures: list[str] = []
    pool = RewardPool(config)
    pool.start()

    async def one(position: int) -> tuple[Problem, list[Answer]]:
        item = source[position]
        prompt = Prompt(f"eval-{position}", item.token_ids, item.text, item.columns)
        answers = await _answers(pool, prompt, sample, engine_seed(seed, prompt.group_id), settings.samples, failures)
        done()
        return _problem(prompt, answers), answers

    try:
        results = await asyncio.gather(*(one(position) for position in range(min(settings.limit, len(source)))))
    finally:
        pool.close()
    return _result(config, source, results, failures)


async def _answers(
    pool: RewardPool, prompt: Prompt, sample: Sampler, seed: int, count: int, failures: list[str]
) -> list[Answer]:
    """The judged responses to one prompt; reasons why any could not be judged are added to `failures`."""
    try:
        samples = await sample(prompt, seed)
    except DataFailure as failure:
        failures.append(str(failure))
        return [Answer(prompt.text, "", None, None, None, truncated=False, tokens=0)] * count
    answers = []
    scores = await _scores(pool, prompt, [sampled.text for sampled in samples], failures)
    for sampled, score in zip(samples, scores, strict=True):
        reward, correct, read = (score.reward, score.correct, score.answer) if score else (None, None, None)
        cut, tokens = sampled.finish_reason == "length", len(sampled.token_ids)
        answers.append(Answer(prompt.text, sampled.text, reward, correct, read, cut, tokens))
    return answers


async def _scores(pool: RewardPool, prompt: Prompt, texts: list[str], failures: list[str]) -> list[Score | None]:
    """Scores; where the reward fails on all texts together, each alone, so that one bad response fails only itself."""
    try:
        return list(await pool.score(prompt, texts))
    except DataFailure as failure:
        if len(texts) == 1:
            failures.append(str(failure))
            return [None]
    return [score for text in texts for score in await _scores(pool, prompt, [text], failures)]


def _problem(prompt: Prompt, answers: list[Answer]) -> Problem:
    return Problem(
        prompt=prompt.text,
        ground_truth=find_truth(prompt.columns),
        samples=len(answers),
        correct=sum(bool(answer.correct) for answer in answers),
        answers=dict(Counter(answer.answer for answer in answers if answer.answer is not None).most_common()),
        truncated=sum(answer.truncated for answer in answers),
        tokens=sum(answer.tokens for answer in answers) / len(answers),
        failures=sum(answer.reward is None for answer in answers),
    )


def _result(
    config: Config, source: Source, results: list[tuple[Problem, list[Answer]]], failures: list[str]
) -> EvalResult:
    settings, sampling = _settings(config), config.sampling
    no_majority = None if tells_answers(config) else f"reward.type {config.reward.type!r} does not tell answers"
    summary = summarise([[a.sample() for a in answers] for _, answers in results], no_majority=no_majority)
    return EvalResult(
        model=config.model.path,
        source=source_name(settings.prompts),
        reward=getattr(config.reward, "function", config.reward.type),
        rows=source.counts.rows,
        merged=source.counts.merged,
        left_out=source.counts.left_out,
        prompts=summary.problems,
        samples=settings.samples,
        sampling={
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_prompt_tokens": sampling.max_prompt_tokens,
            "max_response_tokens": settings.max_response_tokens or sampling.max_response_tokens,
            "seed": config.run.seed if settings.seed is None else settings.seed,
            "dtype": config.generator.dtype,
        },
        bootstrap={"level": LEVEL, "resamples": RESAMPLES, "unit": "problem"},
        accuracy=summary.accuracy.value,
        standard_error=summary.standard_error,
        truncated=summary.truncated.value,
        failures=summary.failures,
        first_failure=failures[0] if failures else None,
        metrics=summary.estimates(),
        no_majority=summary.no_majority,
        problems=tuple(problem for problem, _ in results),
        answers=tuple(answer for _, answers in results for answer in answers),
    )


def _settings(config: Config) -> EvalConfig:
    assert config.eval is not None, "evaluation_source refuses a configuration without this section"
    return config.eval
