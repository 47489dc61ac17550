"""Held-out evaluation: the run's own sampler and reward on prompts that are not trained on."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

from broker import open_source
from common.config import Config
from common.errors import ConfigError
from common.trajectory import Prompt
from generator.engine import Engine
from generator.rewards import DataFailure, RewardPool


@dataclass(frozen=True)
class Answer:
    """One sampled answer; `correct` is the reward's judgement (None: it failed on this one, or cannot tell)."""

    prompt: str
    completion: str
    reward: float | None
    correct: bool | None


@dataclass(frozen=True)
class EvalResult:
    """Mean accuracy over all sampled answers (avg@k), with its standard error over prompts."""

    model: str
    prompts: int
    samples: int
    accuracy: float
    standard_error: float
    failures: int
    truncated: float
    answers: tuple[Answer, ...]

    def summary(self) -> str:
        return (
            f"{self.model}: accuracy {self.accuracy:.3f} +- {self.standard_error:.3f} "
            f"({self.prompts} prompts x {self.samples}, {self.truncated:.0%} truncated, {self.failures} not scored)"
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


async def run_evaluation(config: Config) -> EvalResult:
    """Sample and score the `eval` prompts with `config.model`.

    Raises:
        ConfigError: the configuration has no `eval` section.
    """
    if config.eval is None:
        raise ConfigError("eval: missing; `headrace eval` needs a section eval with prompts to evaluate on")
    source = open_source(config.eval.prompts, config, shuffle=False)
    count = min(config.eval.limit, len(source))
    engine = Engine(config, "eval", initial_version=0)
    pool = RewardPool(config)
    pool.start()
    try:
        await engine.start()
        with Progress(transient=True) as progress:
            task = progress.add_task("evaluating", total=count)

            async def one(position: int) -> list[tuple[Answer, bool]]:
                item = source[position]
                prompt = Prompt(f"eval-{position}", item.token_ids, item.text, item.columns)
                answers = await _answers(config, engine, pool, prompt)
                progress.advance(task)
                return answers

            results = await asyncio.gather(*(one(position) for position in range(count)))
    finally:
        pool.close()
        await engine.close()
    return _result(config, results)


async def _answers(config: Config, engine: Engine, pool: RewardPool, prompt: Prompt) -> list[tuple[Answer, bool]]:
    """Each answer with whether it was cut at the token limit."""
    assert config.eval is not None
    samples = await engine.sample(
        prompt.group_id,
        prompt.token_ids,
        config.eval.samples,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_tokens=config.eval.max_response_tokens,
    )
    texts = [sample.text for sample in samples]
    truncated = [sample.finish_reason == "length" for sample in samples]
    try:
        scores = await pool.score(prompt, texts)
        answers = [Answer(prompt.text, text, s.reward, s.correct) for text, s in zip(texts, scores, strict=True)]
    except DataFailure:
        answers = [Answer(prompt.text, text, None, None) for text in texts]
    return list(zip(answers, truncated, strict=True))


def _result(config: Config, results: list[list[tuple[Answer, bool]]]) -> EvalResult:
    assert config.eval is not None
    per_prompt = [sum(bool(answer.correct) for answer, _ in group) / len(group) for group in results]
    flat = [item for group in results for item in group]
    mean = sum(per_prompt) / len(per_prompt)
    variance = sum((value - mean) ** 2 for value in per_prompt) / max(len(per_prompt) - 1, 1)
    return EvalResult(
        model=config.model.path,
        prompts=len(results),
        samples=config.eval.samples,
        accuracy=mean,
        standard_error=math.sqrt(variance / len(per_prompt)),
        failures=sum(answer.reward is None for answer, _ in flat),
        truncated=sum(truncated for _, truncated in flat) / len(flat),
        answers=tuple(answer for answer, _ in flat),
    )
