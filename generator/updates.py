"""Follows the learner's control stream and keeps the engine's weights current.

What it promises: a version is acknowledged as loaded only when the next token will be sampled by it; an update that the
learner gave up, or that arrived damaged, leaves the old version in place and the requests in flight running. Who is in
which group, who is dropped and what is sent again is the learner's to decide (`learner.membership`), what a message
means for this generator is `generator.standing`'s: this end does it and says how it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from broker import Broker
from broker.records import MemberState
from common.errors import HeadraceError, WireError
from common.log import Logger
from common.weightcontrol import Ack, Commit, Form, Stage, Stop, Update, read_control
from generator.engine import Engine, EngineError
from generator.standing import Standing
from generator.transfer import Transfer, open_transfer

_BLOCK_MS = 1000


class WeightReceiver:
    """The generator's end of weight updates.

    Attributes:
        standing: the state of this generator and the version it holds (`generator.standing`).
        updates: how many were loaded.
        seconds: parts of the last update: stage, pause, load, resume.
        stopped: set when the learner has said that the run is over.
    """

    def __init__(self, engine: Engine, broker: Broker, generator_id: str, log: Logger) -> None:
        self.engine, self.broker, self.generator_id, self.log = engine, broker, generator_id, log
        self.standing = Standing(generator_id)
        self.updates = 0
        self.seconds: dict[str, float] = {}
        self.stopped = asyncio.Event()
        self._changed = asyncio.Condition()
        self._transfer: Transfer = open_transfer(engine)
        self._staged_at = 0.0

    @property
    def state(self) -> MemberState:
        return self.standing.state

    @property
    def version(self) -> int:
        """What the engine samples with; -1 before the first."""
        return self.standing.version

    @property
    def epoch(self) -> int:
        return self.standing.epoch

    async def run(self) -> None:
        """Follow the control stream until the learner says stop.

        Raises:
            EngineError: the engine died or is not usable any more.
        """
        after = await asyncio.to_thread(self.broker.last_control)
        self.standing.follow()
        while not self.stopped.is_set():
            for entry_id, message in await asyncio.to_thread(self.broker.controls, after, _BLOCK_MS):
                after = entry_id
                await self._handle(message)

    async def wait_for_version(self, version: int) -> None:
        """Return when the engine's weights are of `version` or newer (at least of some version)."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= max(version, 0))

    async def wait_until_serving(self) -> None:
        """Return when this generator may take prompts."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state == "serving")

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
        standing, staged = self.standing, self.standing.staged
        if isinstance(control, Stop):
            self.stopped.set()
        elif isinstance(control, Form):
            mine = standing.formed(control)
            await self._abandon(staged, control.epoch)
            if mine:
                await self._join(control)
        elif isinstance(control, Update) and standing.announced(control):
            await self._abandon(staged, control.epoch)
            await self._stage(control)
        elif isinstance(control, Commit) and standing.committed(control):
            await self._apply(control)

    async def _abandon(self, staged: int | None, epoch: int) -> None:
        if staged is not None:
            self.log.warning("the learner gave up version %d; sampling goes on with %d", staged, self.version)
            async with self._or_failed(epoch):
                await self._transfer.abandon()

    async def _join(self, form: Form) -> None:
        if form.backend != self.engine.backend:
            error = (
                f"the learner sends weights over {form.backend}, this generator was started for {self.engine.backend}; "
                "set weights.backend"
            )
            await self._acknowledge("failed", form.epoch, error=error)
            raise EngineError(error)
        async with self._or_failed(form.epoch):
            await self._transfer.join(form, form.ranks[self.generator_id])
        await self._acknowledge("formed", form.epoch)

    async def _stage(self, update: Update) -> None:
        self._staged_at = time.monotonic()
        async with self._or_failed(update.epoch):
            await self._transfer.stage(update)
        await self._acknowledge("receiving", update.epoch)

    async def _apply(self, commit: Commit) -> None:
        stage_s = time.monotonic() - self._staged_at
        async with self._or_failed(commit.epoch):
            checksum = await self._transfer.checksum(commit.version)
            if checksum == commit.checksum:
                parts = await self._transfer.apply(commit.version)
            else:
                await self._transfer.abandon()
        if checksum != commit.checksum:
            self.log.error("version %d arrived damaged; sampling goes on with %d", commit.version, self.version)
            await self._acknowledge("corrupt", commit.epoch, checksum=checksum)
            self.standing.corrupt()
            return
        self.seconds = {"stage": stage_s, **parts}
        self.updates += 1
        self.log.version = str(commit.version)
        await self._acknowledge("loaded", commit.epoch, seconds=self.seconds, checksum=checksum)
        async with self._changed:
            self.standing.loaded()
            self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def _or_failed(self, epoch: int) -> AsyncIterator[None]:
        """Tell the learner before an error ends this process."""
        try:
            yield
        except HeadraceError as error:
            await self._acknowledge("failed", epoch, error=str(error))
            raise

    async def _acknowledge(
        self,
        stage: Stage,
        epoch: int,
        error: str = "",
        seconds: dict[str, float] | None = None,
        checksum: int | None = None,
    ) -> None:
        staged = self.standing.staged
        version = staged if staged is not None else self.version
        ack = Ack(self.generator_id, epoch, version, stage, error, seconds or {}, checksum)
        await asyncio.to_thread(self.broker.acknowledge, ack.message())
