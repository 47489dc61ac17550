"""Receiving weights beside generation: join a group and take the buckets in a thread. Knows no vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from common.checksum import SampledChecksum
from common.weightwire import GlooGroup, Memory, Slot, receive_buckets

Plan = Sequence[Sequence[Slot]]
Prepare = Callable[[Plan, Sequence[torch.Tensor]], None]

_log = logging.getLogger("vllm.headrace.weights")  # below vllm's own: ends in the process's log file


class StagedReceive:
    """One group and what came over it; made for one `Form`, dropped for the next.

    `join` and `stage` return at once. The work is done by threads that only this object knows, so one that hangs with a
    dead peer is simply left behind: it ends with its own deadline, and nobody reads what it got.

    Args:
        before: the group that this one replaces; what it received is not read any more. Its memory goes on to be used.
    """

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, timeout_s: float, before: StagedReceive | None = None
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._memory: Memory = before._memory if before is not None and before._idle else Memory()
        self.plan: Plan = ()
        self._address = (host, port, world_size)
        self._group: GlooGroup | None = None
        self._buckets: list[torch.Tensor] = []
        self._complete = False
        self._checksum: SampledChecksum | None = None
        self._error: Exception | None = None
        self._thread = self._start(self._join, None)

    def stage(self, plan: Plan, version: int, prepare: Prepare | None = None) -> None:
        """Start to receive the buckets of `plan`, the weights of `version`, where the last ones were. The sender waits
        until `prepare`, called in the thread with all of them, is through. What it raises, `take` raises."""
        self.plan, self._buckets, self._complete = plan, [], False
        self._checksum = SampledChecksum(plan, version)
        self._thread = self._start(lambda: self._receive(prepare), self._thread)

    def stream(self, plan: Plan, version: int, handle: Callable[[Sequence[Slot], torch.Tensor], None]) -> None:
        """Receive the buckets of `plan`, the weights of `version`, in the caller's thread; each is handed on as it
        arrives, and not kept.

        Raises:
            RuntimeError: the group did not form, or the transfer failed.
        """
        self._thread.join(self.timeout_s)
        if self._error is not None or self._group is None:
            raise RuntimeError(f"no weights can be received: {self._error or 'the group has not formed'}")
        self._checksum = SampledChecksum(plan, version)
        for slots, bucket in zip(plan, receive_buckets(self._group, plan), strict=True):
            self._checksum.add(slots, bucket)
            handle(slots, bucket)
        self._group.barrier()
        self._group.barrier()

    def take(self) -> list[torch.Tensor]:
        """The received buckets (uint8), once; they hold until the next `stage`, of this group or the one that replaces
        it. To be called when the sender has said that everybody has them.

        Raises:
            RuntimeError: the transfer failed, or is not complete within the deadline, or nothing was staged.
        """
        self._thread.join(self.timeout_s)
        if self._error is not None or self._thread.is_alive() or not self._complete:
            raise RuntimeError(f"the weights are not here: {self._error or 'the transfer is not complete'}")
        buckets, self._buckets, self._complete = self._buckets, [], False
        return buckets

    def checksum(self, version: int) -> int | None:
        """`common.checksum` of what was received; None where that is not all of `version`. When to call: as `take`."""
        self._thread.join(self.timeout_s)
        if self._error is not None or self._thread.is_alive() or self._checksum is None:
            return None
        return self._checksum.value(version)

    @property
    def _idle(self) -> bool:
        """Whether surely nothing is written into the memory any more."""
        return self._error is None and not self._thread.is_alive()

    def _start(self, job: Callable[[], None], before: threading.Thread | None) -> threading.Thread:
        def run() -> None:
            if before is not None:
                before.join()
            if self._error is None:
                try:
                    job()
                except Exception as error:
                    _log.warning("receiving weights as rank %d: %s", self.rank, error)
                    self._error = error

        thread = threading.Thread(target=run, name="weights-receive", daemon=True)
        thread.start()
        return thread

    def _join(self) -> None:
        host, port, world_size = self._address
        self._group = GlooGroup.join(host, port, self.rank, world_size, self.timeout_s)

    def _receive(self, prepare: Prepare | None) -> None:
        assert self._group is not None
        assert self._checksum is not None
        buckets = []
        for slots, bucket in zip(self.plan, receive_buckets(self._group, self.plan, self._memory), strict=True):
            self._checksum.add(slots, bucket)
            buckets.append(bucket)
        self._group.barrier()
        try:
            if prepare is not None:
                prepare(self.plan, buckets)
        finally:
            self._group.barrier()
        self._buckets, self._complete = buckets, True
