"""A generator's share of evaluation during training: held-out prompts, one at a time, beside its training prompts.

What it promises: an answer is of the round's policy version or a newer one, and says of which; answers that the reward
fails on stay unscored; a prompt that is not answered here, because this process ends, is taken over by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker import Broker, EvalLease
from common.config import Config
from common.log import Logger
from common.trajectory import EvalAnswer, EvalAnswers
from generator.engine import Engine, Sampled
from generator.rewards import DataFailure, RewardPool, Score

_POLL_S = 0.5  # between looks for a round; within one, prompt follows prompt


class LiveEvaluation:
    """Answers evaluation prompts with the generator's own engine and rewards.

    Attributes:
        held: the lease that wants renewing, if any.
        answered: how many prompts were answered.
    """

    def __init__(
        self, config: Config, generator_id: str, broker: Broker, engine: Engine, rewards: RewardPool, log: Logger
    ) -> None:
        assert config.eval is not None
        self._options, self._id, self._log = config.eval, generator_id, log
        self._broker, self._engine, self._rewards = broker, engine, rewards
        self.held: str | None = None
        self.answered = 0

    async def run(self, slots: asyncio.Semaphore) -> None:
        """Answer for ever. Each prompt takes one of the `slots` of the training prompts, in turn with them.

        Raises:
            EngineError: the engine died.
        """
        while True:
            version = -1 if self._engine.version is None else self._engine.version
            lease = await asyncio.to_thread(self._broker.lease_evaluation, self._id, version)
            if lease is None:
                await asyncio.sleep(_POLL_S)
                continue
            self.held = lease.entry_id
            async with slots:
                answers = await self._answer(lease)
            if await asyncio.to_thread(self._broker.answer_evaluation, lease.entry_id, answers):
                self.answered += 1
            self.held = None

    async def _answer(self, lease: EvalLease) -> EvalAnswers:
        options = self._options
        try:
            # Entry ids of the two streams may be the same; request ids may not.
            samples = await self._engine.sample(
                f"eval-{lease.entry_id}",
                lease.prompt.token_ids,
                options.samples,
                temperature=options.temperature,
                top_p=options.top_p,
                max_tokens=options.max_response_tokens,
            )
        except DataFailure as failure:
            self._log.warning("evaluation prompt %s failed: %s", lease.prompt.group_id, failure)
            return EvalAnswers(lease.version, lease.index, ())
        scores: Sequence[Score | None] = [None] * len(samples)
        try:
            scores = await self._rewards.score(lease.prompt, [sample.text for sample in samples])
        except DataFailure as failure:
            self._log.warning("evaluation prompt %s is not scored: %s", lease.prompt.group_id, failure)
        answers = tuple(_answer(sample, score) for sample, score in zip(samples, scores, strict=True))
        return EvalAnswers(lease.version, lease.index, answers)


def _answer(sample: Sampled, score: Score | None) -> EvalAnswer:
    versions = [run.version for run in sample.versions]
    return EvalAnswer(
        tokens=len(sample.token_ids),
        truncated=sample.finish_reason == "length",
        reward=None if score is None else score.reward,
        correct=None if score is None else score.correct,
        oldest_version=min(versions),
        newest_version=max(versions),
    )
