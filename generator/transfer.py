"""What differs between the weight-transfer backends on the generator's side.

gloo stages while the engine generates and pauses only to change over; with `weights.staging: off`, and with nccl
(vLLM's own engine), the weights are received straight into the model, which pauses generation for the whole transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Protocol

from common.weightcontrol import Form, Update
from generator.engine import Engine, EngineError


class Transfer(Protocol):
    """The steps of an update, in order; each raises EngineError when the engine cannot go on."""

    async def join(self, form: Form, rank: int) -> None:
        """Send the workers into the group. Returns while they are on their way."""

    async def stage(self, update: Update) -> None:
        """Start to receive. Returns while the weights are on their way."""

    async def checksum(self, version: int) -> int | None:
        """Everybody has sent and received: `common.checksum` of what arrived; None where it cannot be told."""

    async def apply(self, version: int) -> dict[str, float]:
        """Everybody has sent and received: load, stamp `version`, go on. Returns the seconds of each part."""

    async def abandon(self) -> None:
        """Forget an update that was staged and will not be applied."""


class GlooTransfer:
    """The backend of `generator.gloo_plugin`, staged."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open = False

    async def join(self, form: Form, rank: int) -> None:
        await _join_gloo(self.engine, form, rank)

    async def stage(self, update: Update) -> None:
        await self.engine.control(self.engine.llm.start_weight_update(), "start_weight_update")
        self._open = True
        await self._update({"mode": "stage", "version": update.version, **_lists(update)})

    async def checksum(self, version: int) -> int | None:
        return await _gloo_checksum(self.engine, version)

    async def apply(self, version: int) -> dict[str, float]:
        marks = [time.monotonic()]
        await self.engine.pause()
        marks.append(time.monotonic())
        await self._update({"mode": "apply"})
        call = self.engine.llm.finish_weight_update(weight_version=str(version))
        await self.engine.control(call, "finish_weight_update")
        self._open = False
        marks.append(time.monotonic())
        await self.engine.resume(version)
        marks.append(time.monotonic())
        pause, load, resume = (b - a for a, b in itertools.pairwise(marks))
        return {"pause": pause, "load": load, "resume": resume}

    async def abandon(self) -> None:
        if self._open:
            self._open = False
            await self.engine.control(self.engine.llm.finish_weight_update(), "finish_weight_update")

    async def _update(self, info: dict[str, object]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(info)
        await self.engine.control(self.engine.llm.update_weights(request), f"update_weights {info['mode']}")


class _InPlaceTransfer:
    """Receiving into the model, paused. An update that breaks off leaves the model half loaded: an EngineError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._receiving: asyncio.Task[None] | None = None
        self._started = 0.0

    def _info(self, update: Update) -> dict[str, object]:
        """What the worker's `update_weights` is told."""
        raise NotImplementedError

    async def stage(self, update: Update) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._started = time.monotonic()
        await self.engine.pause()
        await self.engine.control(self.engine.llm.start_weight_update(), "start_weight_update")
        call = self.engine.llm.update_weights(WeightTransferUpdateRequest(self._info(update)))
        self._receiving = asyncio.create_task(self.engine.control(call, "update_weights"))

    async def checksum(self, version: int) -> int | None:
        return None  # vLLM's engine loads what it receives

    async def apply(self, version: int) -> dict[str, float]:
        assert self._receiving is not None
        await self._receiving
        self._receiving = None
        call = self.engine.llm.finish_weight_update(weight_version=str(version))
        await self.engine.control(call, "finish_weight_update")
        loaded = time.monotonic()
        await self.engine.resume(version)
        return {"load": loaded - self._started, "resume": time.monotonic() - loaded}

    async def abandon(self) -> None:
        if self._receiving is not None:
            raise EngineError("an update broke off while the model was being loaded; this engine must start again")


class GlooInPlaceTransfer(_InPlaceTransfer):
    """The backend of `generator.gloo_plugin` without a staged copy."""

    async def join(self, form: Form, rank: int) -> None:
        await _join_gloo(self.engine, form, rank)

    def _info(self, update: Update) -> dict[str, object]:
        return {"mode": "stream", "version": update.version, **_lists(update)}

    async def checksum(self, version: int) -> int | None:
        """Too late to keep damaged weights out of the model: `abandon` then ends the engine."""
        assert self._receiving is not None
        await self._receiving
        return await _gloo_checksum(self.engine, version)


class NcclTransfer(_InPlaceTransfer):
    """vLLM's native `nccl` backend, packed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._joining: asyncio.Task[None] | None = None

    async def join(self, form: Form, rank: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._joining is not None and not self._joining.done():
            raise EngineError("the workers are still waiting in a group that never formed")
        release = self.engine.llm.shutdown_weight_transfer_engine()
        await self.engine.control(release, "shutdown_weight_transfer_engine")
        info = {
            "master_address": form.host,
            "master_port": form.port,
            "rank_offset": rank,
            "world_size": form.world_size,
            "packed": True,
            "packed_buffer_size_bytes": form.bucket_bytes,
            "packed_num_buffers": 2,
        }
        call = self.engine.llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
        # Blocks in the workers until the sender comes, which waits for our acknowledgement.
        self._joining = asyncio.create_task(self.engine.control(call, "init_weight_transfer_engine"))

    async def stage(self, update: Update) -> None:
        assert self._joining is not None
        await self._joining
        await super().stage(update)

    def _info(self, update: Update) -> dict[str, object]:
        lists = _lists(update)
        return {"names": lists["names"], "dtype_names": lists["dtypes"], "shapes": lists["shapes"]}


async def _join_gloo(engine: Engine, form: Form, rank: int) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    info = {
        "master_address": form.host,
        "master_port": form.port,
        "rank_offset": rank,
        "world_size": form.world_size,
        "bucket_bytes": form.bucket_bytes,
        "timeout_s": form.timeout_s,
    }
    call = engine.llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
    await engine.control(call, "init_weight_transfer_engine")


async def _gloo_checksum(engine: Engine, version: int) -> int | None:
    """What all workers of the engine say; None where they differ, or one has not received everything."""
    found = set(await engine.control(engine.llm.collective_rpc("received_checksum", args=(version,)), "checksum"))
    return found.pop() if len(found) == 1 else None


def _lists(update: Update) -> dict[str, object]:
    message = update.message()
    return {key: message[key] for key in ("names", "dtypes", "shapes", "adapter")}


def open_transfer(engine: Engine) -> Transfer:
    if engine.backend == "nccl":
        return NcclTransfer(engine)
    return GlooTransfer(engine) if engine.config.weights.staging else GlooInPlaceTransfer(engine)
