"""`python -m tests.chaos.elastic_players service|generator CONFIG [NAME]`: what feeds a real learner without vLLM.

The prompts' fates and the engine that waits are those of `tests.chaos`; token ids fit the tiny model's vocabulary, and
weights are received over gloo as a generator does, then thrown away. RUN/pace holds the median seconds of an answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import broker.service as service_module
from broker import Broker, Counts, Sourced
from common import log as logs
from common import settings
from common.config import Config
from common.trajectory import Int32Array, PartialResponse
from common.weightcontrol import Form, Update
from common.weightwire import plan_buckets
from generator.engine import Report, Sampled
from generator.loop import Generator
from generator.receive import StagedReceive
from tests.chaos.players import LightEngine, LightRewards

VOCABULARY = 500


class SmallSource:
    """Endless, in the tiny model's tokens."""

    counts = Counts(1_000_000)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, position: int) -> Sourced:
        return Sourced(np.full(3, position % VOCABULARY, np.int32), f"prompt {position}", {"answer": str(position)})


class PacedEngine(LightEngine):
    """As fast as RUN/pace says."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 1.0)
        self._pace = config.run.folder / "pace"

    async def sample(
        self, request: str, prompt_ids: Int32Array, n: int, *, begun: Sequence[PartialResponse], report: Report
    ) -> list[Sampled]:
        self._median_s = float(self._pace.read_text())
        sampled = await super().sample(request, prompt_ids, n, begun=begun, report=report)
        return [replace(each, token_ids=each.token_ids % VOCABULARY) for each in sampled]


class Receiving:
    """`generator.transfer.Transfer` that receives over gloo."""

    def __init__(self, engine: LightEngine) -> None:
        self._engine = engine
        self._receive: StagedReceive | None = None
        self._bucket_bytes = 0

    async def join(self, form: Form, rank: int) -> None:
        self._receive = StagedReceive(form.host, form.port, rank, form.world_size, form.timeout_s, self._receive)
        self._bucket_bytes = form.bucket_bytes

    async def stage(self, update: Update) -> None:
        assert self._receive is not None
        self._receive.stage(plan_buckets(update.parameters, self._bucket_bytes), update.version)

    async def checksum(self, version: int) -> int | None:
        assert self._receive is not None
        return await asyncio.to_thread(self._receive.checksum, version)

    async def apply(self, version: int) -> dict[str, float]:
        assert self._receive is not None
        await asyncio.to_thread(self._receive.take)
        self._engine.version = version
        return {"load": 0.0}

    async def abandon(self) -> None: ...


def service(config: Config) -> int:
    service_module.load_tokenizer = lambda config: None  # type: ignore[assignment]
    service_module.open_source = lambda *args, **kwargs: SmallSource()  # type: ignore[assignment]
    return service_module.run_service(config)


def generator(config: Config, name: str) -> int:
    log = logs.setup(config.run.run_id, name)
    engine = PacedEngine(config)
    member = Generator(config, name, Broker.connect(config), log, engine)  # type: ignore[arg-type]
    member.rewards = LightRewards(config.run.seed)  # type: ignore[assignment]
    member.receiver._transfer = Receiving(engine)
    asyncio.run(member.run())
    return 0


if __name__ == "__main__":
    loaded = settings.load(Path(sys.argv[2]))
    sys.exit(service(loaded) if sys.argv[1] == "service" else generator(loaded, sys.argv[3]))
