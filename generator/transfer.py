"""What differs between the weight-transfer backends on the generator's side.

gloo stages while the engine generates and pauses only to load; nccl (vLLM's own engine) receives straight into the
model, so it pauses for the whole transfer.
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
        """Everybody has sent and received: `common.checksum` of what is here; None where it cannot be told before."""

    async def apply(self, version: int) -> dict[str, float]:
        """Load, stamp `version`, go on. Returns the seconds of each part."""

    async def abandon(self) -> None:
        """Forget an update that was staged and will not be applied."""


class GlooTransfer:
    """The backend of `generator.gloo_plugin`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open = False

    async def join(self, form: Form, rank: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "master_address": form.host,
            "master_port": form.port,
            "rank_offset": rank,
            "world_size": form.world_size,
            "bucket_bytes": form.bucket_bytes,
            "timeout_s": form.timeout_s,
        }
        call = self.engine.llm.init_weight_transfer_engine(WeightTransferInitRequest(info))
        await self.engine.control(call, "init_weight_transfer_engine")

    async def stage(self, update: Update) -> None:
        message = update.message()
        await self.engine.control(self.engine.llm.start_weight_update(), "start_weight_update")
        self._open = True
        await self._update({"mode": "stage", **{key: message[key] for key in ("names", "dtypes", "shapes")}})

    async def checksum(self, version: int) -> int | None:
        call = self.engine.llm.collective_rpc("staged_checksum", args=(version,))
        found = set(await self.engine.control(call, "staged_checksum"))
        return found.pop() if len(found) == 1 else None

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


class NcclTransfer:
    """vLLM's native `nccl` backend, packed. An update that breaks off leaves the model half loaded: an EngineError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._joining: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None

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
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert self._joining is not None
        await self._joining
        await self.engine.pause()
        await self.engine.control(self.engine.llm.start_weight_update(), "start_weight_update")
        message = update.message()
        info = {"names": message["names"], "dtype_names": message["dtypes"], "shapes": message["shapes"]}
        call = self.engine.llm.update_weights(WeightTransferUpdateRequest(info))
        self._receiving = asyncio.create_task(self.engine.control(call, "update_weights"))

    async def checksum(self, version: int) -> int | None:
        return None  # vLLM's engine loads what it receives

    async def apply(self, version: int) -> dict[str, float]:
        assert self._receiving is not None
        started = time.monotonic()
        await self._receiving
        self._receiving = None
        call = self.engine.llm.finish_weight_update(weight_version=str(version))
        await self.engine.control(call, "finish_weight_update")
        loaded = time.monotonic()
        await self.engine.resume(version)
        return {"load": loaded - started, "resume": time.monotonic() - loaded}

    async def abandon(self) -> None:
        if self._receiving is not None:
            raise EngineError("an update broke off while the model was being loaded; this engine must start again")


def open_transfer(engine: Engine) -> Transfer:
    return NcclTransfer(engine) if engine.backend == "nccl" else GlooTransfer(engine)
