"""Follows the learner's control stream and keeps the engine's weights current.

What it promises: a version is acknowledged as loaded only when the next token will be sampled by it; an update that the
learner gave up leaves the old version in place and the requests in flight running. The decisions (who is in which
group, who is dropped, what is sent again) are the learner's: this end does what it is told and says how it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Literal

from broker import Broker
from common.errors import HeadraceError, WireError
from common.log import Logger
from common.weightcontrol import Ack, Commit, Form, Stage, Stop, Update, read_control
from generator.engine import Engine, EngineError
from generator.transfer import Transfer, open_transfer

_BLOCK_MS = 1000


class WeightReceiver:
    """The generator's end of weight updates.

    Attributes:
        state: "joining" until `run` follows the control stream, "syncing" until the first version is loaded (the
            learner sends to members in this state), then "serving".
        version: what the engine samples with; -1 before the first.
        epoch: the group the engine belongs to; 0 before the first.
        updates: how many were loaded.
        seconds: parts of the last update: stage, pause, load, resume.
        stopped: set when the learner has said that the run is over.
    """

    def __init__(self, engine: Engine, broker: Broker, generator_id: str, log: Logger) -> None:
        self.engine, self.broker, self.generator_id, self.log = engine, broker, generator_id, log
        self.state: Literal["joining", "syncing", "serving"] = "joining"
        self.version, self.epoch, self.updates = -1, 0, 0
        self.seconds: dict[str, float] = {}
        self.stopped = asyncio.Event()
        self._changed = asyncio.Condition()
        self._transfer: Transfer = open_transfer(engine)
        self._staging: int | None = None
        self._staged_at = 0.0

    async def run(self) -> None:
        """Follow the control stream until the learner says stop.

        Raises:
            EngineError: the engine died or is not usable any more.
        """
        after = await asyncio.to_thread(self.broker.last_control)
        self.state = "syncing"
        while not self.stopped.is_set():
            for entry_id, message in await asyncio.to_thread(self.broker.controls, after, _BLOCK_MS):
                after = entry_id
                await self._handle(message)

    async def wait_for_version(self, version: int) -> None:
        """Return when the engine's weights are of `version` or newer (at least of some version)."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= max(version, 0))

    async def wait_for_update(self, timeout_s: float) -> None:
        """Return when other weights are loaded, at the latest after `timeout_s`."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def _handle(self, message: dict[str, object]) -> None:
        try:
            control = read_control(message)
        except WireError as error:
            self.log.error("%s", error)
            return
        if isinstance(control, Stop):
            self.stopped.set()
        elif isinstance(control, Form) and self.generator_id in control.ranks:
            await self._form(control)
        elif isinstance(control, Update) and control.epoch == self.epoch:
            await self._stage(control)
        elif isinstance(control, Commit) and control.epoch == self.epoch and control.version == self._staging:
            await self._apply(control.version)

    async def _form(self, form: Form) -> None:
        if form.backend != self.engine.backend:
            error = (
                f"the learner sends weights over {form.backend}, this generator was started for {self.engine.backend}; "
                "set weights.backend"
            )
            await self._acknowledge("failed", form.epoch, error=error)
            raise EngineError(error)
        try:
            await self._abandon()
            await self._transfer.join(form, form.ranks[self.generator_id])
        except HeadraceError as error:
            await self._acknowledge("failed", form.epoch, error=str(error))
            raise
        self.epoch = form.epoch
        await self._acknowledge("formed", form.epoch)

    async def _abandon(self) -> None:
        if self._staging is not None:
            self.log.warning("the learner gave up version %d; sampling goes on with %d", self._staging, self.version)
            self._staging = None
        await self._transfer.abandon()

    async def _stage(self, update: Update) -> None:
        await self._abandon()
        self._staging, self._staged_at = update.version, time.monotonic()
        try:
            await self._transfer.stage(update)
        except HeadraceError as error:
            await self._acknowledge("failed", update.epoch, str(error))
            raise
        await self._acknowledge("receiving", update.epoch)

    async def _apply(self, version: int) -> None:
        stage_s = time.monotonic() - self._staged_at
        try:
            parts = await self._transfer.apply(version)
        except HeadraceError as error:
            await self._acknowledge("failed", self.epoch, str(error))
            raise
        self._staging = None
        self.seconds = {"stage": stage_s, **parts}
        self.updates += 1
        self.state = "serving"
        self.log.version = str(version)
        async with self._changed:
            self.version = version
            self._changed.notify_all()
        await self._acknowledge("loaded", self.epoch, seconds=self.seconds)

    async def _acknowledge(
        self, stage: Stage, epoch: int, error: str = "", seconds: dict[str, float] | None = None
    ) -> None:
        version = self._staging if self._staging is not None else self.version
        ack = Ack(self.generator_id, epoch, version, stage, error, seconds or {})
        await asyncio.to_thread(self.broker.acknowledge, ack.message())
