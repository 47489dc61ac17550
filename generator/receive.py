"""Receiving weights beside generation: join a group and take the buckets in a thread. Knows no vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from common.checksum import sampled_checksum
from common.weightwire import GlooGroup, Slot, receive_buckets

_log = logging.getLogger("vllm.headrace.weights")  # below vllm's own: ends in the process's log file


class StagedReceive:
    """One group and what came over it; made for one `Form`, dropped for the next.

    `join` and `stage` return at once. The work is done by threads that only this object knows, so one that hangs with a
    dead peer is simply left behind: it ends with its own deadline, and nobody reads what it got.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.plan: Sequence[Sequence[Slot]] = ()
        self._address = (host, port, world_size)
        self._group: GlooGroup | None = None
        self._buckets: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._thread = self._start(self._join, None)

    def stage(self, plan: Sequence[Sequence[Slot]]) -> None:
        """Start to receive the buckets of `plan`."""
        self.plan, self._buckets = plan, []
        self._thread = self._start(self._receive, self._thread)

    def take(self) -> list[torch.Tensor]:
        """The received buckets (uint8), once. To be called when the sender has said that everybody has them.

        Raises:
            RuntimeError: the transfer failed, or is not complete within the deadline, or nothing was staged.
        """
        self._thread.join(self.timeout_s)
        if self._error is not None or self._thread.is_alive() or not self._buckets:
            raise RuntimeError(f"the weights are not here: {self._error or 'the transfer is not complete'}")
        buckets, self._buckets = self._buckets, []
        return buckets

    def checksum(self, version: int) -> int | None:
        """`common.checksum` of what was received, or None where that is not everything. When to call: as `take`."""
        self._thread.join(self.timeout_s)
        if self._error is not None or self._thread.is_alive() or not self._buckets:
            return None
        return sampled_checksum(self.plan, self._buckets, version)

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

    def _receive(self) -> None:
        assert self._group is not None
        buckets = list(receive_buckets(self._group, self.plan))
        self._group.barrier()
        self._buckets = buckets
