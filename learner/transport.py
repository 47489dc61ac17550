"""What differs between the weight-transfer backends on the sender's side: rank 0 of a group that was announced."""

from __future__ import annotations

import socket
import time
from typing import Any, Protocol

import torch

from common.errors import HeadraceError
from common.weightwire import GlooGroup, send_buckets
from learner.staging import Staged


class Link(Protocol):
    """One group of the sender and some generators. Methods block and may hang with a dead peer: run them watched.

    `settle_s`: of the last `send`, the seconds from everything received to everybody ready.
    """

    host: str
    port: int
    settle_s: float

    def connect(self) -> None:
        """Return when all ranks have come; MissingRanksError where it is known who did not."""

    def send(self, staged: Staged) -> None:
        """Send everything; return when every rank has received it and is ready to change over to it."""

    def close(self) -> None:
        """Give the group up. Never blocks for long."""


class GlooLink:
    """Over `common.weightwire`, beside the learner's own torch.distributed group."""

    def __init__(self, host: str, world_size: int, timeout_s: float) -> None:
        self.host, self.settle_s = host, 0.0
        self._group = GlooGroup.listen(host, world_size, timeout_s)
        self.port = self._group.port

    def connect(self) -> None:
        self._group.connect()

    def send(self, staged: Staged) -> None:
        send_buckets(self._group, staged.buckets())
        received = time.monotonic()
        self._group.barrier()
        self.settle_s = time.monotonic() - received

    def close(self) -> None:
        self._group.close()


class NcclLink:
    """Over vLLM's PyNccl communicator and its packed broadcast: what vLLM's own `nccl` engine receives."""

    def __init__(self, host: str, world_size: int, bucket_bytes: int) -> None:
        self.host, self.world_size, self.bucket_bytes, self.settle_s = host, world_size, bucket_bytes, 0.0
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None
        self._closed = False
        with socket.socket() as probe:  # vLLM's helper wants the port beforehand
            probe.bind((host, 0))
            self.port = int(probe.getsockname()[1])

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(self._device)  # per thread
        group = trainer_init({"master_address": self.host, "master_port": self.port, "world_size": self.world_size})
        if group.disabled:  # it would send nothing, and say nothing
            raise HeadraceError("vLLM could not load NCCL in the learner's process (libnccl)")
        self._group = group
        if self._closed:  # given up meanwhile
            self.close()

    def send(self, staged: Staged) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self._device)
        packed_nccl_broadcast_producer(
            iterator=staged.tensors(),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1].to(self._device),
            buffer_size_bytes=self.bucket_bytes,
            num_buffers=2,
        )

    def close(self) -> None:
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            group.destroy()  # aborts, with a deadline of its own; a send that hangs returns


def open_link(backend: str, host: str, world_size: int, timeout_s: float, bucket_bytes: int) -> Link:
    """Make the sender's end and the port that generators are told."""
    if backend == "nccl":
        return NcclLink(host, world_size, bucket_bytes)
    return GlooLink(host, world_size, timeout_s)
