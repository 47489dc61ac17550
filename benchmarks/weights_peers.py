"""The receivers of `benchmarks.weights`, one process each: a real vLLM engine, or the real receive code without one.

Both follow the control stream with `generator.updates.WeightReceiver`. A light one keeps what it received for a moment
and drops it: it has no engine to load it into. The parent sends (method, *arguments) over a pipe and gets the result.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from broker import Broker, Member
from common.config import Config
from common.log import setup
from common.weightcontrol import Form, Update
from common.weightwire import GlooGroup, plan_buckets
from generator.engine import Engine
from generator.receive import StagedReceive
from generator.transfer import GlooInPlaceTransfer, GlooTransfer
from generator.updates import WeightReceiver

STREAMS = 8  # requests that sample all the time
TOKENS = 64  # of each


class LightTransfer:
    """The steps of `generator.transfer.Transfer` without an engine."""

    _receive: StagedReceive | None = None
    _bucket_bytes: int

    async def join(self, form: Form, rank: int) -> None:
        self._bucket_bytes = form.bucket_bytes
        self._receive = StagedReceive(form.host, form.port, rank, form.world_size, form.timeout_s, self._receive)

    @property
    def _open(self) -> StagedReceive:
        assert self._receive is not None
        return self._receive

    async def stage(self, update: Update) -> None:
        self._open.stage(plan_buckets(update.parameters, self._bucket_bytes), update.version)

    async def checksum(self, version: int) -> int | None:
        return self._open.checksum(version)

    async def apply(self, version: int) -> dict[str, float]:
        await asyncio.to_thread(self._open.take)
        return {}

    async def abandon(self) -> None:
        """Nothing: the next group replaces the receiver."""


class Peer:
    """Methods whose names have no underscore are the commands."""

    def __init__(self, config: Config, name: str, light: bool) -> None:
        self.config, self.name, self.light = config, name, light
        self.log = setup(config.run.run_id, name, level=30)
        self.engine = Engine(config, name)
        self.broker = Broker.connect(config)
        self.receiver = WeightReceiver(self.engine, self.broker, name, self.log)
        if light:
            self.receiver._transfer = LightTransfer()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[asyncio.Task[None]] = []
        self._times: list[tuple[float, int]] = []

    async def start(self) -> None:
        """Load the engine, where there is one."""
        if not self.light:
            await self.engine.start()

    async def join(self) -> float:
        """Appear in the registry and follow the control stream. Returns the (machine's monotonic) time."""
        self._tasks = [asyncio.create_task(self.receiver.run()), asyncio.create_task(self._heartbeat())]
        return time.monotonic()

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.broker.leave, self.name)
        self.receiver = WeightReceiver(self.engine, self.broker, self.name, self.log)
        self.receiver._transfer = LightTransfer()

    async def _heartbeat(self) -> None:
        while True:
            receiver = self.receiver
            host, pid = socket.gethostname(), os.getpid()
            member = Member(self.name, "generator", receiver.state, receiver.version, receiver.epoch, host, pid, {})
            await asyncio.to_thread(self.broker.heartbeat, member)
            await asyncio.sleep(self.config.broker.heartbeat_s)

    async def holds(self, version: int) -> float:
        """Wait for a version; the time when it was there."""
        await asyncio.wait_for(self.receiver.wait_for_version(version), 60)
        return time.monotonic()

    async def seconds(self) -> dict[str, float]:
        """The parts of the last update."""
        return self.receiver.seconds

    async def staging(self, on: bool) -> None:
        self.receiver._transfer = (GlooTransfer if on else GlooInPlaceTransfer)(self.engine)

    async def generate(self, on: bool) -> None:
        """Start or stop sampling."""
        if on:
            self._streams = [asyncio.create_task(self._stream(index)) for index in range(STREAMS)]
            return
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def _stream(self, index: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        count = 0
        while True:
            params = SamplingParams(
                temperature=1.0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            prompt = {"prompt_token_ids": [index + 1] * 16}
            async for output in self.engine.llm.generate(prompt, params, f"{index}-{count}"):
                self._times.append((time.monotonic(), len(output.outputs[0].token_ids)))
            count += 1

    async def times(self) -> list[tuple[float, int]]:
        """When tokens came, and how many, since the last call."""
        for stream in self._streams:
            if stream.done():
                await stream  # it never ends but by an error
        out, self._times = self._times, []
        return out

    async def load(self, repeats: int) -> list[float]:
        """Seconds that vLLM's own reload takes with all tensors in the worker's memory."""
        out = await self.engine.llm.collective_rpc(_reload, args=(self.config.model.path, repeats))
        return [float(seconds) for seconds in out[0]]

    async def raw(self, port: int, rank: int, world_size: int, pieces: list[int], repeats: int) -> None:
        await asyncio.to_thread(_raw_receive, self.config, port, rank, world_size, pieces, repeats)

    async def stop(self) -> None:
        await self.generate(False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.close()
        self.broker.close()


def _reload(worker: Any, folder: str, repeats: int) -> list[float]:
    """Runs inside vLLM's worker."""
    from safetensors.torch import load_file

    tensors = {name: tensor.float() for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    out = []
    for _ in range(repeats):
        started = time.perf_counter()
        worker.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        out.append(time.perf_counter() - started)
    return out


def _raw_receive(config: Config, port: int, rank: int, world_size: int, pieces: list[int], repeats: int) -> None:
    group = GlooGroup.join(config.weights.host or "127.0.0.1", port, rank, world_size, config.weights.timeout_s)
    raw_broadcast(group, pieces, repeats)


def raw_broadcast(group: GlooGroup, pieces: list[int], repeats: int) -> list[float]:
    """Seconds of plain broadcasts into memory that is there already, barrier to barrier; the first is left out."""
    buffers = [torch.ones(size, dtype=torch.uint8) for size in pieces]
    out = []
    for _ in range(repeats + 1):
        group.barrier()
        started = time.monotonic()
        for work in [group.broadcast(buffer) for buffer in buffers]:
            work.wait()
        group.barrier()
        out.append(time.monotonic() - started)
    return out[1:]


def main(pipe: Connection, config: Config, name: str, light: bool) -> None:
    """Entry point of the process, which leads a group of its own: vLLM's processes can be ended with it."""
    os.setsid()
    asyncio.run(_serve(pipe, Peer(config, name, light)))


async def _serve(pipe: Connection, peer: Peer) -> None:
    while True:
        try:
            method, *arguments = await asyncio.to_thread(pipe.recv)
        except EOFError:  # the parent is gone
            method, arguments = "stop", []
        try:
            pipe.send((await getattr(peer, method)(*arguments), None))
        except BrokenPipeError:
            pass
        except Exception as error:
            pipe.send((None, f"{peer.name}: {method}: {error!r}"))
        if method == "stop":
            return
