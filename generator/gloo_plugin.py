"""vLLM plug-in: the weight-transfer backend `gloo`, for workers on CPUs (and, slowly, anywhere).

Loaded by vLLM in each of its processes through the entry-point group `vllm.general_plugins`. What it promises:

- Weights are staged first and applied whole. Joining the group, receiving, and loading them into a twin of the model
  happen in a thread, while the engine goes on generating; only handing them over needs a pause (a model that has no
  twin, see `Twin.supports`, is loaded in the pause). A transfer that breaks leaves the model as it was.
- A session is `start_weight_update`, `update_weights` with mode "stage", the same with mode "apply",
  `finish_weight_update`. Finished without "apply" it is abandoned and changes nothing.
- Where there is no memory for that, `update_weights` with mode "stream" loads into the model what it receives, bucket
  by bucket; the engine is paused meanwhile, and of no use any more if that breaks.
- With LoRA what arrives are an adapter's factors: what is loaded, in every mode, is a whole model, the base as vLLM
  itself reads it with the adapter added (`generator.adapters`).
- A parameter that did not arrive, or that the model did not take, is an error, never a half-updated model in use.

Registered by `register`, which may be called any number of times.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from common.lora import Adapter
from common.weightwire import Slot, parse, plan_buckets
from generator import lifeline
from generator.adapters import Base
from generator.receive import StagedReceive
from generator.reload import Reload, Twin

BACKEND = "gloo"
Named = Iterable[tuple[str, torch.Tensor]]
_NAP_MS = 2


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the sender's group is. Ranks of this replica's workers start at `rank_offset`; 0 is the sender."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What to do next; the parameter lists belong to "stage" and "stream"."""

    mode: Literal["stage", "apply", "stream"]
    version: int = -1
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    adapter: dict[str, Any] | None = None  # fields of `common.lora.Adapter`


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Worker side; methods are called by the vLLM worker between engine steps."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _receive: StagedReceive | None = None
    _bucket_bytes = 0
    _twin: Twin | None = None
    _reload: Reload | None = None
    _adapter: Adapter | None = None  # of the update under way
    _base: Base | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Start joining the group; returns at once."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._bucket_bytes = init_info.bucket_bytes
        host, port, world_size = init_info.master_address, init_info.master_port, init_info.world_size
        self._receive = StagedReceive(host, port, rank, world_size, init_info.timeout_s, self._receive)

    def start_weight_update(self) -> None:
        """Nothing yet: the layerwise reload takes the model apart, so it waits until everything has arrived."""
        self._twin = self._reload = None

    def update_weights(self, update_info: dict[str, object]) -> None:
        # The base class then synchronises an accelerator, which does not exist here.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._receive is None:
            raise RuntimeError("no weight-transfer group; call init_weight_transfer_engine first")
        if update_info.mode != "apply":
            self._adapter = None if update_info.adapter is None else Adapter(**update_info.adapter)
        if update_info.mode == "stage":
            prepare = self._load_twin if Twin.supports(self.model) else None
            self._receive.stage(self._plan(update_info), update_info.version, prepare)
        elif update_info.mode == "apply":
            self._apply(self._receive)
        elif update_info.mode == "stream":
            self._stream(self._receive, update_info)
        else:
            raise ValueError(f"mode is {update_info.mode!r}; expected 'stage', 'apply' or 'stream'")

    def _plan(self, update_info: GlooUpdateInfo) -> list[list[Slot]]:
        # The shapes the loader knows: the live parameters may be repacked, and on CPUs some are emptied. Tied weights
        # and padding make the two sides differ, but not by a factor of two.
        layers = (get_layerwise_info(layer).restore_metadata[0] for layer in self.model.modules())
        limit = 2 * self.parallel_config.world_size * sum(meta.numel() for layer in layers for meta in layer.values())
        parameters = parse(update_info.names, update_info.dtypes, update_info.shapes, max_elements=limit)
        return plan_buckets(parameters, self._bucket_bytes)

    def _load_twin(self, plan: Sequence[Sequence[Slot]], buckets: Sequence[torch.Tensor]) -> None:
        """In the receiving thread."""
        tensors = self._tensors(plan, buckets)
        twin = Twin(self.model, self.model_config)
        for named in tensors:
            twin.load(named)
        twin.finish()
        self._twin = twin

    def received_checksum(self, version: int) -> int | None:
        return None if self._receive is None else self._receive.checksum(version)

    def _apply(self, receive: StagedReceive) -> None:
        buckets = receive.take()
        if self._twin is not None:
            self._twin.swap()
            return
        self._load(self._tensors(receive.plan, buckets))

    def _load(self, tensors: Iterable[Named]) -> None:
        """Into the live model, which is of no use any more if this breaks."""
        self._reload = Reload(self.model, self.model_config)
        for named in tensors:
            self._reload.load(named)

    def _stream(self, receive: StagedReceive, update_info: GlooUpdateInfo) -> None:
        plan = self._plan(update_info)
        if self._adapter is None:
            self._reload = reload = Reload(self.model, self.model_config)
            receive.stream(plan, update_info.version, lambda slots, bucket: reload.load(_named(slots, bucket)))
            return
        buckets: list[torch.Tensor] = []
        receive.stream(plan, update_info.version, lambda _, bucket: buckets.append(bucket))
        self._load(self._tensors(plan, buckets))

    def _tensors(self, plan: Sequence[Sequence[Slot]], buckets: Sequence[torch.Tensor]) -> Iterator[Named]:
        """What to load, in parts, under Hugging Face names. An adapter is checked before this returns."""
        arrived = zip(plan, buckets, strict=True)
        if self._adapter is None:
            return (_named(slots, bucket) for slots, bucket in arrived)
        factors = dict(pair for slots, bucket in arrived for pair in _named(slots, bucket))
        if self._base is None:
            self._base = Base(self._base_weights, self.model_config.dtype, self.device)
        return iter([self._base.merged(factors, self._adapter)])

    def _base_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What vLLM loaded at the start, read again: safetensors are mapped, and shared by all engines of a machine."""
        settings = copy.copy(self.vllm_config.load_config)
        settings.use_tqdm_on_load = False
        named: Iterable[tuple[str, torch.Tensor]] = get_model_loader(settings).get_all_weights(
            self.model_config, self.model
        )
        return named

    def finish_weight_update(self) -> None:
        reload, self._reload, self._twin = self._reload, None, None
        if reload is not None:
            reload.finish()

    def shutdown(self) -> None:
        """Let go of the group; a receive under way ends by itself and is not read."""
        self._receive = self._twin = None


def _named(slots: Sequence[Slot], bucket: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(slot.parameter.name, slot.view(bucket)) for slot in slots]


class WorkerChecks:
    """Mixed into vLLM's worker (`worker_extension_cls`): what can be asked of it with `collective_rpc`."""

    weight_transfer_engine: GlooEngine

    def received_checksum(self, version: int) -> int | None:
        """Of the weights that were received last; see `common.checksum`."""
        return self.weight_transfer_engine.received_checksum(version)


def register() -> None:
    """Make the backend known to vLLM in this process, which ends with its generator and is good to others on a CPU."""
    lifeline.follow()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "generator.gloo_plugin", "GlooEngine")
    if current_platform.is_cpu():
        _wait_without_spinning()


def _wait_without_spinning() -> None:
    """vLLM's engine waits for its worker, and the worker for work, by spinning for a second after every message. On a
    CPU that is a whole core, taken from the worker and the learner: sleep on the socket that announces a message.

    Not for long: that socket holds one announcement and drops the rest, so of two messages in quick succession the
    second may come unannounced, and vLLM itself would look again only after its recheck interval (5 s).
    """
    SpinCondition.wait = _napping_wait


def _napping_wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
    """`SpinCondition.wait`, with naps in place of `sched_yield`."""
    if time.monotonic() > self.last_read + self.busy_loop_s:
        _patient_wait(self, timeout_ms)
    elif self.local_notify_socket in dict(self.poller.poll(_NAP_MS)):
        self.local_notify_socket.recv(flags=zmq.NOBLOCK, copy=False)


_patient_wait = SpinCondition.wait
