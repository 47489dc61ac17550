"""What the NCCL path gives to vLLM and gets from it: vLLM's own code, on a communicator that is a queue."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import HeadraceError
from common.weightcontrol import Form, Update
from generator.transfer import NcclTransfer
from learner.staging import Staged
from learner.transport import NcclLink

BUCKET = 4096
WEIGHTS = {
    "embed": torch.randn(64, 48),  # larger than a bucket
    "norm": torch.randn(24),
    "scale": torch.tensor(3.0).reshape(1),
    **{f"layer{i}": torch.randn(24, 11) for i in range(9)},
}


class Wire:
    """A broadcast to one receiver."""

    disabled = False

    def __init__(self) -> None:
        self.sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.destroyed = 0

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        if threading.current_thread().name == "receiver":
            came = self.sent.get(timeout=10)
            assert came.shape == tensor.shape, "both ends cut the stream alike"
            tensor.copy_(came)
        else:
            self.sent.put(tensor.clone())

    def destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """vLLM's NCCL code without a GPU."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    wire, stream = Wire(), SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", lambda *args, **kwargs: wire)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    yield wire


def link_to(wire: Wire) -> NcclLink:
    link = NcclLink("127.0.0.1", world_size=2, bucket_bytes=BUCKET)
    link._device = torch.device("cpu")
    link.connect()
    return link


@pytest.fixture
def staged() -> Staged:
    staged = Staged(BUCKET)
    staged.fill(WEIGHTS.items(), torch.bfloat16)
    return staged


def form(ranks: dict[str, int], world_size: int) -> Form:
    return Form(7, "nccl", "127.0.0.1", 4242, world_size, ranks, BUCKET, 30.0)


class FakeEngine:
    """Records what is asked of vLLM's AsyncLLM, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.llm = self

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args[0] if args else kwargs))

        return call

    async def control(self, call: Any, what: str) -> Any:
        return await call


async def test_update_over_nccl_vllms_consumer_gets_every_tensor(wire: Wire, staged: Staged) -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    engine = FakeEngine()
    transfer = NcclTransfer(engine)  # type: ignore[arg-type]
    await transfer.join(form({"g": 1}, 2), 1)
    await transfer.stage(Update(7, 3, staged.parameters))
    await transfer.apply(3)
    assert [name for name, _ in engine.calls] == [
        "shutdown_weight_transfer_engine", "init_weight_transfer_engine", "pause", "start_weight_update",
        "update_weights", "finish_weight_update", "resume",
    ]  # fmt: skip
    asked = dict(engine.calls)
    assert asked["finish_weight_update"] == {"weight_version": "3"}
    init = NCCLWeightTransferInitInfo(**asked["init_weight_transfer_engine"].init_info)
    update = NCCLWeightTransferUpdateInfo(**asked["update_weights"].update_info)
    received: dict[str, torch.Tensor] = {}

    def consume() -> None:
        entries = zip(update.names, update.shapes, update.dtype_names, strict=True)
        packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, shape, dtype in entries),
            group=wire,
            src=0,
            post_unpack_func=lambda tensors: received.update({name: tensor.clone() for name, tensor in tensors}),
            buffer_size_bytes=init.packed_buffer_size_bytes,
            num_buffers=init.packed_num_buffers,
            device="cpu",
        )

    receiver = threading.Thread(target=consume, name="receiver")
    receiver.start()
    link = link_to(wire)
    link.send(staged)
    receiver.join(10)
    assert init.packed and not receiver.is_alive() and wire.sent.empty()
    assert received.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(received[name], tensor.to(torch.bfloat16)), name


def test_close_aborts_once_even_where_the_group_comes_together_afterwards(wire: Wire) -> None:
    link = link_to(wire)
    link.close()
    link.close()
    assert wire.destroyed == 1
    link.connect()  # the thread that was left behind
    assert wire.destroyed == 2 and link._group is None


def test_nccl_that_did_not_load_is_an_error_and_not_an_empty_broadcast(wire: Wire) -> None:
    wire.disabled = True
    with pytest.raises(HeadraceError, match="NCCL"):
        link_to(wire)


async def test_tensor_parallel_workers_of_all_generators_get_ranks_of_their_own(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's nccl engine and `generator.gloo_plugin` count: data-parallel index, then rank in the replica."""
    from vllm.distributed.weight_transfer import nccl_common

    import generator.gloo_plugin as plugin

    workers = 2
    ranks = {name: 1 + workers * index for index, name in enumerate(("a", "b", "c"))}  # as the publisher does
    over_nccl, over_gloo = [], []
    monkeypatch.setattr(
        nccl_common, "stateless_init_process_group", lambda host, port, rank, size, device: over_nccl.append(rank)
    )
    monkeypatch.setattr(plugin, "StagedReceive", lambda host, port, rank, *rest: over_gloo.append(rank))
    for name, offset in ranks.items():
        engine = FakeEngine()
        transfer = NcclTransfer(engine)  # type: ignore[arg-type]
        await transfer.join(form(ranks, 1 + workers * len(ranks)), ranks[name])
        assert transfer._joining is not None
        await transfer._joining
        asked = dict(engine.calls)["init_weight_transfer_engine"].init_info
        for rank in range(workers):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank)
            info = nccl_common.NCCLWeightTransferInitInfo(**asked)
            nccl_common.worker_init_process_group(info, parallel)  # type: ignore[arg-type]
            gloo = plugin.GlooEngine.__new__(plugin.GlooEngine)
            gloo.parallel_config = parallel
            gloo.init_transfer_engine(plugin.GlooInitInfo("h", 1, offset, 7, BUCKET, 30.0))
    assert over_nccl == over_gloo == list(range(1, 7))
