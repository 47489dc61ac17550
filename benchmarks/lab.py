"""Many short runs in a row with one vLLM: start it once, lend it to a real generator per run.

Each run has its own run id on one Valkey server, a broker service, a `generator.loop.Generator` in this process, and a
learner in a process of its own, and is the same code as a fleet of `headrace up`. Only the engine, whose start would
take longer than a run, is kept; the learner's first broadcast gives it the starting weights again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from broker import Broker, Server, open_source
from broker.service import run_service
from broker.sources import Sourced
from common.config import Config
from common.log import Logger
from common.trajectory import Prompt
from generator.engine import Engine
from generator.loop import Generator
from generator.rewards import RewardPool

ROOT = Path(__file__).resolve().parent.parent


class LentEngine(Engine):
    """An engine that outlives the generators it is lent to."""

    async def start(self) -> None:
        """Nothing: `power_on` has."""

    async def close(self) -> None:
        """Nothing: `power_off` will."""

    async def power_on(self) -> None:
        await super().start()

    async def power_off(self) -> None:
        await super().close()

    async def lend(self, config: Config) -> None:
        """Forget the last run: its version, its cache, a pause it may have left."""
        self.config, self.version = config, None
        await self.control(self.llm.reset_prefix_cache(), "reset_prefix_cache")
        await self.control(self.llm.resume_generation(), "resume_generation")


@dataclass(frozen=True)
class Outcome:
    """A run's metrics, a record per step, and the accuracy of its last weights over all prompts."""

    records: list[dict[str, float]]
    accuracy: float
    entropy: float


class Lab:
    """One server and one engine for all runs."""

    def __init__(self, folder: Path, server: Server, engine: LentEngine) -> None:
        self.folder, self.server, self.engine = folder, server, engine

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, config: Config) -> AsyncIterator[Lab]:
        """Start the server and the engine. `config` fixes what vLLM is started with: model, lengths, cache."""
        engine = LentEngine(config, "lab")
        with Server(config.broker).start(folder) as server:
            await engine.power_on()
            try:
                yield cls(folder, server, engine)
            finally:
                await engine.power_off()

    async def run(self, config: Config) -> Outcome:
        """Train `config` to its last step."""
        config = self._here(config)
        config.run.folder.mkdir(parents=True, exist_ok=True)
        path = config.run.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
        await self.engine.lend(config)
        broker = Broker.connect(config)
        stopping = threading.Event()
        service = asyncio.create_task(asyncio.to_thread(run_service, config, stopping))
        generator = asyncio.create_task(
            Generator(config, "lab", broker, Logger(config.run.run_id, "lab"), self.engine).run()
        )
        try:
            await self._learn(path, config, generator)
            await asyncio.wait_for(generator, 60)
        finally:
            generator.cancel()
            stopping.set()
            await service
            broker.close()
        lines = (config.run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        accuracy, entropy = await self._examine(config)
        return Outcome([json.loads(line) for line in lines], accuracy, entropy)

    def _here(self, config: Config) -> Config:
        broker = config.broker.model_copy(update={"url": self.server.url, "password_file": self.server.password_file})
        run = config.run.model_copy(update={"dir": self.folder / "runs"})
        return config.model_copy(update={"broker": broker, "run": run})

    async def _learn(self, path: Path, config: Config, generator: asyncio.Task[None]) -> None:
        """The learner, one rank, without torchrun's agent; ends with it, or with the generator's failure."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(config.learner.threads),
        }  # fmt: skip
        log = config.run.folder / "learner.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "learner.main", str(path), cwd=ROOT, env=environ, stdout=file, stderr=file
            )
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait([ended, generator], return_when=asyncio.FIRST_COMPLETED)
                if generator.done() and generator.exception() is not None:
                    await generator
                if await ended:
                    raise RuntimeError(f"the learner failed, see {log}")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def _examine(self, config: Config) -> tuple[float, float]:
        """The weights in the engine, over every prompt, at the training temperature: accuracy, and the estimate of the
        entropy per token by minus the mean log-probability, in nats."""
        source = open_source(config.prompts, config, shuffle=False)
        pool = RewardPool(config)
        pool.start()
        try:
            groups = await asyncio.gather(*(self._answers(config, pool, source[i], i) for i in range(len(source))))
        finally:
            pool.close()
        correct = [score for scores, _ in groups for score in scores]
        logprobs = np.concatenate([values for _, values in groups])
        return float(np.mean(correct)), float(-logprobs.mean())

    async def _answers(
        self, config: Config, pool: RewardPool, item: Sourced, index: int
    ) -> tuple[list[float], NDArray[np.float32]]:
        samples = await self.engine.sample(f"{config.run.run_id}-exam-{index}", item.token_ids, 4)
        prompt = Prompt(f"exam-{index}", item.token_ids, item.text, item.columns)
        scores = await pool.score(prompt, [sample.text for sample in samples])
        return [score.reward for score in scores], np.concatenate([sample.logprobs for sample in samples])
