"""Weights on the wire: the bucket plan both ends compute, and a process group of their own to send the buckets over.

What it promises: sender and receiver derive the same buckets from the same parameter list; nothing about a parameter
is believed before it is checked; the process group never touches torch.distributed's default group, so a learner may
hold one; every wait has a deadline. Knows neither vLLM nor DeepSpeed.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.errors import HeadraceError, WireError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIGNMENT = 64  # bytes; a tensor view needs its offset to be a multiple of its item size
_IN_FLIGHT = 2  # buckets posted at a time: one on the wire while the other is handled


@dataclass(frozen=True)
class Parameter:
    """One tensor as announced: its Hugging Face name, wire dtype (a key of DTYPES) and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: bytes [offset, offset + nbytes) of bucket number `bucket`."""

    parameter: Parameter
    bucket: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.parameter.nbytes

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The parameter inside its bucket (uint8, one-dimensional), without a copy."""
        return bucket[self.offset : self.end].view(DTYPES[self.parameter.dtype]).view(self.parameter.shape)


class BucketPlanner:
    """Places parameters one by one, in order: a bucket takes what fits, a larger parameter gets a bucket of its own."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._bucket, self._end = 0, 0

    def add(self, parameter: Parameter) -> Slot:
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._end and offset + parameter.nbytes > self.bucket_bytes:
            self._bucket, offset = self._bucket + 1, 0
        slot = Slot(parameter, self._bucket, offset)
        self._end = slot.end
        return slot


def plan_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[list[Slot]]:
    """The slots of every bucket, in sending order."""
    planner = BucketPlanner(bucket_bytes)
    plan: list[list[Slot]] = []
    for parameter in parameters:
        slot = planner.add(parameter)
        if slot.bucket == len(plan):
            plan.append([])
        plan[slot.bucket].append(slot)
    return plan


def bucket_size(slots: Sequence[Slot]) -> int:
    """Bytes of a bucket on the wire."""
    return slots[-1].end


def describe(parameters: Iterable[Parameter]) -> dict[str, list[object]]:
    """Plain lists for a control message; `parse` is its inverse."""
    listed = list(parameters)
    return {
        "names": [p.name for p in listed],
        "dtypes": [p.dtype for p in listed],
        "shapes": [list(p.shape) for p in listed],
    }


def parse(names: object, dtypes: object, shapes: object, max_elements: int | None = None) -> list[Parameter]:
    """The parameters in a control message, checked before anything is allocated for them.

    Args:
        max_elements: most elements in all; None: no limit.

    Raises:
        WireError: lists of different lengths, an unknown dtype, a shape that is none, a name twice, or too much.
    """
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise WireError("weights: names, dtypes and shapes must be lists")
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise WireError(
            f"weights: {len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes; expected as many, at least 1"
        )
    out: dict[str, Parameter] = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str) or name in out:
            raise WireError(f"weights: name {name!r:.80} is not a name, or comes twice")
        if dtype not in DTYPES:
            raise WireError(f"weights: {name}: dtype {dtype!r:.80}; expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n > 0 for n in shape):
            raise WireError(f"weights: {name}: shape {shape!r:.80}; expected positive integers")
        out[name] = Parameter(name, dtype, tuple(shape))
    elements = sum(math.prod(p.shape) for p in out.values())
    if max_elements is not None and elements > max_elements:
        raise WireError(f"weights: {elements} elements announced; the model has room for at most {max_elements}")
    return list(out.values())


class MissingRanksError(HeadraceError):
    """Some ranks did not come into the group."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks} did not connect")
        self.ranks = ranks


class GlooGroup:
    """A gloo process group beside torch.distributed's default group.

    Rank 0 owns the rendezvous store: `listen` makes it and picks the port, `connect` blocks until all have come.
    """

    def __init__(self, store: dist.TCPStore, host: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._host = store, host
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._group: Any = None  # ProcessGroupGloo, whose stubs lack the collectives

    @classmethod
    def listen(cls, host: str, world_size: int, timeout_s: float) -> GlooGroup:
        store = dist.TCPStore(
            host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
        )
        return cls(store, host, 0, world_size, timeout_s)

    @classmethod
    def join(cls, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> GlooGroup:
        store = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
        )
        store.set(f"here/{rank}", "1")
        group = cls(store, host, rank, world_size, timeout_s)
        group.connect()
        return group

    @property
    def port(self) -> int:
        return int(self._store.port)

    def connect(self) -> None:
        """Connect to all other ranks.

        Raises:
            MissingRanksError: some did not come within half of `timeout_s` (rank 0 only).
            RuntimeError: they came, but could not be connected.
        """
        if self.rank == 0:
            self._await_ranks(self.timeout_s / 2)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Otherwise gloo binds to whatever the host name resolves to, which need not reach the sender.
        address = _own_address(self._host, self.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=self.timeout_s)
        options._threads = 2
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), self.rank, self.world_size, options
        )

    def _await_ranks(self, timeout_s: float) -> None:
        keys = {rank: f"here/{rank}" for rank in range(1, self.world_size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise MissingRanksError(missing) from None

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start a broadcast from rank 0; `tensor` is sent there and filled elsewhere."""
        assert self._group is not None, "connect first"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.timeout_s)
        work: dist.Work = self._group.broadcast([tensor], options)
        return work

    def barrier(self) -> None:
        """Return when every rank has called it."""
        assert self._group is not None, "connect first"
        # Not gloo's barrier: it ignores the group's deadline in some versions; a one-element sum is as good.
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self.timeout_s)
        self._group.allreduce([torch.zeros(1)], options).wait()

    def close(self) -> None:
        """Forget the group. Waits that are under way end with their own deadline: gloo cannot be interrupted."""
        self._group = None


def _own_address(host: str, port: int) -> str:
    """The address this machine uses to talk to `host`."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def send_buckets(group: GlooGroup, buckets: Sequence[torch.Tensor]) -> None:
    """Broadcast the buckets (uint8) in order; return when every rank has received all of them. When the next `barrier`
    returns, they have also made of them what they can before they are told to change over."""
    works: list[dist.Work] = []
    for bucket in buckets:
        if len(works) == _IN_FLIGHT:
            works.pop(0).wait()
        works.append(group.broadcast(bucket))
    for work in works:
        work.wait()
    group.barrier()


class Memory:
    """Buckets that are kept: the page faults of new memory cost a receiver about as much as the transfer itself."""

    def __init__(self) -> None:
        self._buckets: list[torch.Tensor] = []

    def room(self, index: int, size: int) -> torch.Tensor:
        """`size` bytes (uint8), those of the last call with this `index` where they are enough; indices from 0 on."""
        if index == len(self._buckets):
            self._buckets.append(torch.empty(size, dtype=torch.uint8))
        elif size > len(self._buckets[index]):
            self._buckets[index] = torch.empty(size, dtype=torch.uint8)
        return self._buckets[index][:size]


def receive_buckets(
    group: GlooGroup, plan: Sequence[Sequence[Slot]], memory: Memory | None = None
) -> Iterator[torch.Tensor]:
    """The buckets of `plan`, each as soon as it is complete, in `memory` (None: in new memory). Call `group.barrier()`
    after the last, and again when ready to change over to them."""
    posted: list[tuple[dist.Work, torch.Tensor]] = []
    for index, slots in enumerate(plan):
        if len(posted) == _IN_FLIGHT:
            work, bucket = posted.pop(0)
            work.wait()
            yield bucket
        size = bucket_size(slots)
        bucket = torch.empty(size, dtype=torch.uint8) if memory is None else memory.room(index, size)
        posted.append((group.broadcast(bucket), bucket))
    for work, bucket in posted:
        work.wait()
        yield bucket


def resolve_backend(backend: str) -> str:
    """What `weights.backend` means on this machine: "auto" is nccl where there is a GPU, else gloo."""
    if backend == "auto":
        return "nccl" if torch.cuda.is_available() else "gloo"
    return backend
