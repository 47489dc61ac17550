"""The processes of a chaos run: the product's own code, with something light where vLLM and DeepSpeed would be.

- `service` is `broker.service.run_service` on an artificial source;
- `generator` is `generator.loop.Generator` with an engine that waits instead of sampling and a weight transfer that
  moves nothing;
- `learner` does what `learner.loop.Learner._lead` does, on the real collector, batches and checkpoint folders. Its
  weights are the ids of the groups it was trained on, which is what has to be right in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import broker.service as service_module
from broker import Broker, Member
from common import log as logs
from common.config import Config
from common.errors import ConfigError, FencedError, HeadraceError
from common.trajectory import Int32Array, PartialResponse, Prompt, VersionRun
from common.weightcontrol import STOP, Commit, Form, Update
from common.weightwire import Parameter
from generator.engine import Report
from generator.loop import Generator
from generator.responses import Interrupted, Sampled
from generator.rewards import DataFailure, Score
from learner import checkpoint
from learner import settling as settling_module
from learner.batch import Step, build_step
from learner.checkpoint import Folder, State
from learner.collector import Batch, Collector
from learner.saving import Kind, Saver
from learner.settling import Settling
from tests.chaos.prompts import Source, fate, response_tokens, sampling_s

PIECES = 3
LOGPROB = -1.0  # of a token of version 0; that of version v is lower by v
_LONG_S = 60.0
FENCED, NO_SERVER, LOST, CRASHED = 10, 11, 12, 1


def run(role: str, name: str, spec: dict[str, Any]) -> int:
    """One process, from its start to its exit code."""
    try:
        config = Config.model_validate(spec["config"])
        {"service": service, "generator": generator, "learner": learner}[role](config, name, spec)
    except FencedError as error:
        print(error, file=sys.stderr)
        return FENCED
    except ConfigError as error:  # started while the server was down; its supervisor starts it again
        print(error, file=sys.stderr)
        return NO_SERVER
    except HeadraceError as error:
        traceback.print_exc()
        return LOST if spec["lossy"] and _saw_loss(error) else CRASHED
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _saw_loss(error: HeadraceError) -> bool:
    """Whether a learner noticed that the server had lost writes: a step out of turn, or a group delivered twice."""
    return "LOST writes" in str(error) or "times in one step" in str(error)


# --- the broker service


def service(config: Config, _name: str, _spec: dict[str, Any]) -> None:
    service_module.load_tokenizer = lambda config: None  # type: ignore[assignment]
    service_module.open_source = lambda *args, **kwargs: Source()  # type: ignore[assignment]
    service_module.run_service(config)


# --- a generator


class LightEngine:
    """What `Generator` needs of `generator.engine.Engine`; a response is sampled in `PIECES` pieces, or fewer where it
    was begun elsewhere."""

    backend = "gloo"

    def __init__(self, config: Config, median_s: float) -> None:
        self.config, self.version, self._median_s = config, -1, median_s
        self.tokens = 0
        self._running, self._interrupted, self._idle = 0, asyncio.Event(), asyncio.Event()
        self._idle.set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {"tokens": float(self.tokens)}

    async def interrupt(self) -> None:
        self._interrupted.set()
        await self._idle.wait()

    async def sample(
        self, _request: str, prompt_ids: Int32Array, n: int, *, begun: Sequence[PartialResponse], report: Report
    ) -> list[Sampled]:
        seconds = sampling_s(self.config.run.seed, f"{int(prompt_ids[0]):09d}", self._median_s)
        answers = [response_tokens(prompt_ids, index) for index in range(n)]
        grown = list(begun)
        self._running, done = self._running + 1, 0
        self._idle.clear()
        try:
            while any(response.finish_reason is None for response in grown):
                await self.pause(seconds / PIECES, done)
                for index, tokens in enumerate(answers):
                    if grown[index].finish_reason is None:
                        before = len(grown[index].token_ids)
                        grown[index] = self._grow(grown[index], tokens)
                        self.tokens += len(grown[index].token_ids) - before
                        report(index, grown[index])
                done += 1
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        return [Sampled(g.token_ids, g.logprobs, g.versions, "stop", str(index)) for index, g in enumerate(grown)]

    async def pause(self, seconds: float, done: int) -> None:
        """What sampling a piece takes, after `done` others. Raises Interrupted."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interrupted.wait(), seconds)
            raise Interrupted

    def _grow(self, so_far: PartialResponse, tokens: Int32Array) -> PartialResponse:
        before = len(so_far.token_ids)
        assert np.array_equal(so_far.token_ids, tokens[:before])
        end = min(len(tokens), before + -(-len(tokens) // PIECES))
        runs = so_far.versions
        if not runs or runs[-1].version != self.version:
            runs = (*runs, VersionRun(self.version, before))
        logprobs = np.append(so_far.logprobs, np.full(end - before, LOGPROB - self.version, np.float32))
        return PartialResponse(tokens[:end], logprobs, runs, "stop" if end == len(tokens) else None)


class LightTransfer:
    """`generator.transfer.Transfer` without weights."""

    def __init__(self, engine: LightEngine) -> None:
        self._engine = engine

    async def join(self, form: Form, rank: int) -> None: ...

    async def stage(self, update: Update) -> None: ...

    async def checksum(self, version: int) -> int | None:
        return None

    async def apply(self, version: int) -> dict[str, float]:
        self._engine.version = version
        return {"load": 0.0}

    async def abandon(self) -> None: ...


class LightRewards:
    """`RewardPool` without processes: what a prompt deserves is in its id."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Score]:
        deserved = fate(self._seed, prompt.group_id)
        if deserved == "dead" or (deserved == "flaky" and prompt.attempt == 0):
            raise DataFailure(f"prompt {prompt.group_id} fails, attempt {prompt.attempt}", "reward_raised")
        right = {"correct": len(completions), "wrong": 0}.get(deserved, len(completions) // 2)
        return [Score(float(index < right), index < right) for index in range(len(completions))]


def generator(config: Config, name: str, spec: dict[str, Any]) -> None:
    log = logs.setup(config.run.run_id, name)
    engine = LightEngine(config, spec["median_s"])
    member = Generator(config, name, Broker.connect(config), log, engine)  # type: ignore[arg-type]
    member.rewards = LightRewards(config.run.seed)  # type: ignore[assignment]
    member.receiver._transfer = LightTransfer(engine)
    asyncio.run(member.run())


# --- the learner


class LightPublisher:
    """Brings the version to all who lack it, as `learner.publisher` does, but without sending anything."""

    def __init__(self, broker: Broker, config: Config, version: int) -> None:
        self.version = version
        self._broker, self._config = broker, config
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, version: int) -> None:
        self.version = version
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(self._config.broker.heartbeat_s)
            self._changed.clear()
            version = self.version
            members = self._broker.members("generator")
            lacking = [m.id for m in members if m.state in ("syncing", "serving") and m.version != version]
            if not lacking:
                continue
            seconds, micros = self._broker._call(self._broker._client.time)
            epoch = seconds * 1_000_000 + micros
            ranks = {name: rank for rank, name in enumerate(lacking, 1)}
            parameter = Parameter("weight", "float32", (1,))
            for message in (
                Form(epoch, "gloo", "127.0.0.1", 1, len(ranks) + 1, ranks, 1024, 1.0).message(),
                Update(epoch, version, (parameter,)).message(),
                Commit(epoch, version).message(),
            ):
                self._broker.announce(message)


class LightLearner:
    """Rank 0 of a learner whose weights are a list of [group id, version] pairs."""

    def __init__(self, config: Config, spec: dict[str, Any]) -> None:
        self.config = config
        self.stopping = threading.Event()
        self.version, self.weights = 0, list[list[Any]]()
        state: State | None = None
        folder = checkpoint.newest(*config.save_folders)
        if folder is not None:
            state = checkpoint.read_state(folder)
            self.version = state.version
            if problem := checkpoint.broken(folder):
                if (folder / checkpoint.STATE).exists():
                    raise AssertionError(f"{folder}: {problem}")  # no kill may leave a broken one
                raise ConfigError(f"{folder} has gone")
            try:
                self.weights = json.loads((folder / "weights.json").read_text())
            except FileNotFoundError:  # a learner that is being replaced makes checkpoints, and removes older ones
                raise ConfigError(f"{folder} has gone") from None
        contained = state.groups if state is not None else ()
        self._rng = random.Random(f"{config.run.seed}:{os.getpid()}")
        self._train_s = spec["train_s"]
        self._target = Path(spec["target"])
        self._diary = os.open(spec["diary"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.broker = Broker.connect(config)
        self.epoch = self.broker.begin(self.version, contained)
        self.settling = Settling(self.broker, self.epoch, config, contained)
        self.saver = Saver(
            config, logging.getLogger("headrace.learner"), lambda: self.broker.hold(self.epoch)  # type: ignore[arg-type]
        )
        self._write(event="begin", version=self.version, contained=len(contained))
        checkpoint.require_newest(state, *config.save_folders)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        publisher = LightPublisher(self.broker, self.config, self.version)
        threading.Thread(target=self._heartbeat, daemon=True).start()
        collector = Collector(self.broker, self.epoch, self.config)
        try:
            while not self._complete() and not self.stopping.is_set():
                self._settle()
                batch = collector.next(self.version, 0.5, self.stopping)
                if batch is None:
                    continue
                step = build_step([each.group for each in batch.deliveries], self.config, self.version)
                if not step.tokens:
                    self.broker.expire(self.epoch, batch.deliveries)
                    continue
                kind = self.saver.due(self.version + 1)
                self._train(batch, step)
                publisher.publish(self.version)
                self._dawdle()
                self.settling.trained(self.version, batch)
                if kind is not None:
                    self._save(kind)
            self._settle(wait_s=_LONG_S)
            if self.saver.checkpointed != self.version:
                self._save("checkpoint")
                self._settle(wait_s=_LONG_S)
            if self._complete():
                self.broker.finish()
                self.broker.announce(STOP)
        finally:
            collector.close()

    def _complete(self) -> bool:
        try:
            return self.version >= int(self._target.read_text())
        except FileNotFoundError:
            return False

    def _train(self, batch: Batch, step: Step) -> None:
        """Put the groups into the weights; what a step may not contain ends the process."""
        oldest = 0
        for delivery, trained in zip(batch.deliveries, step.groups, strict=True):
            group = delivery.group
            assert group.prompt_ids[0] == int(group.group_id), group.group_id
            for index, (response, sequence) in enumerate(zip(group.responses, trained.sequences, strict=True)):
                assert np.array_equal(response.token_ids, response_tokens(group.prompt_ids, index)), group.group_id
                # Every token still has the log-probability of the version that sampled it, seams or not.
                assert np.array_equal(response.logprobs, LOGPROB - response.token_versions()), group.group_id
                ages = np.abs(self.version - response.token_versions())[sequence.mask]
                oldest = max(oldest, int(ages.max(initial=0)))
        self._dawdle()
        self.version += 1
        ids = [delivery.group.group_id for delivery in batch.deliveries]
        self.weights += [[group_id, self.version] for group_id in ids]
        self._write(event="step", version=self.version, ids=ids, staleness=oldest)

    def _save(self, kind: Kind) -> None:
        weights = json.dumps(self.weights).encode()

        def fill(folder: Folder) -> None:
            half = len(weights) // 2
            folder.write("weights.json", self._slowly([weights[:half], weights[half:]]))
            self._dawdle()

        self.saver.start(kind, State(self.version, 1, self.settling.ids, self.epoch), fill)

    def _settle(self, wait_s: float = 0.0) -> None:
        saved = self.saver.ended(wait_s)
        if saved is not None:
            assert saved.error is None, saved.error
            self._dawdle()
            self.settling.saved(saved.kind, saved.state.groups)

    def _slowly(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            self._dawdle()

    def _dawdle(self) -> None:
        """Time for a kill to come in between."""
        threading.Event().wait(self._rng.expovariate(1 / self._train_s))

    def _write(self, **record: object) -> None:
        os.write(self._diary, json.dumps({"epoch": self.epoch, **record}).encode() + b"\n")

    def _heartbeat(self) -> None:
        while not self.stopping.wait(self.config.broker.heartbeat_s):
            self.broker.heartbeat(
                Member("learner", "learner", "serving", self.version, self.epoch, socket.gethostname(), os.getpid(), {})
            )


def learner(config: Config, _name: str, spec: dict[str, Any]) -> None:
    logs.setup(config.run.run_id, "learner")
    settling_module.DURABLE_S = 2.0
    LightLearner(config, spec).run()
