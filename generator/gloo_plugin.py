"""vLLM plug-in: the weight-transfer backend `gloo`, for workers on CPUs (and, slowly, anywhere).

Loaded by vLLM in each of its processes through the entry-point group `vllm.general_plugins`. What it promises:

- Weights are staged first and applied whole. Joining the group and receiving happen in a thread, while the engine goes
  on generating; only the copy into the model needs a pause. A transfer that breaks leaves the model as it was.
- A session is `start_weight_update`, `update_weights` with mode "stage", the same with mode "apply",
  `finish_weight_update`. Finished without "apply" it is abandoned and changes nothing.
- A parameter that did not arrive, or that the model did not take, is an error, never a half-updated model in use.

Registered by `register`, which may be called any number of times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from common.weightwire import Slot, parse, plan_buckets
from generator.receive import StagedReceive

BACKEND = "gloo"
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
    """What to do next; the parameter lists belong to "stage"."""

    mode: Literal["stage", "apply"]
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Worker side; methods are called by the vLLM worker between engine steps."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    _receive: StagedReceive | None = None
    _bucket_bytes = 0
    _applied = False

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Start joining the group; returns at once."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._bucket_bytes = init_info.bucket_bytes
        self._receive = StagedReceive(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Nothing yet: the layerwise reload takes the model apart, so it waits until everything has arrived."""
        self._applied = False

    def update_weights(self, update_info: dict[str, object]) -> None:
        # The base class then synchronises an accelerator, which does not exist here.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._receive is None:
            raise RuntimeError("no weight-transfer group; call init_weight_transfer_engine first")
        if update_info.mode == "stage":
            self._receive.stage(self._plan(update_info))
        elif update_info.mode == "apply":
            self._apply(self._receive)
        else:
            raise ValueError(f"mode is {update_info.mode!r}; expected 'stage' or 'apply'")

    def _plan(self, update_info: GlooUpdateInfo) -> list[list[Slot]]:
        # The shapes the loader knows: the live parameters may be repacked, and on CPUs some are emptied. Tied weights
        # and padding make the two sides differ, but not by a factor of two.
        layers = (get_layerwise_info(layer).restore_metadata[0] for layer in self.model.modules())
        limit = 2 * self.parallel_config.world_size * sum(meta.numel() for layer in layers for meta in layer.values())
        parameters = parse(update_info.names, update_info.dtypes, update_info.shapes, max_elements=limit)
        return plan_buckets(parameters, self._bucket_bytes)

    def staged_checksum(self, version: int) -> int | None:
        return None if self._receive is None else self._receive.checksum(version)

    def _apply(self, receive: StagedReceive) -> None:
        buckets = receive.take()
        initialize_layerwise_reload(self.model)
        self._applied = True
        for slots, bucket in zip(receive.plan, buckets, strict=True):
            self.model.load_weights([(slot.parameter.name, slot.view(bucket)) for slot in slots])

    def finish_weight_update(self) -> None:
        if not self._applied:
            return
        self._applied = False
        missing = self._layers_without_weights()
        finalize_layerwise_reload(self.model, self.model_config)
        if missing:
            raise RuntimeError(f"the update had no weights for: {', '.join(missing[:8])}")
        self._refresh_tied_lm_head()

    def _tied_lm_head(self) -> Any:
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return getattr(self.model, "lm_head", None)
        return None

    def _layers_without_weights(self) -> list[str]:
        """Layers that have parameters and got none; vLLM would only log a warning and keep the old ones."""
        tied = self._tied_lm_head()
        out = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if layer is tied or is_deferred_attention_layer(layer) or not info.can_load():
                continue
            if info.load_numel == 0 and info.restore_metadata[0]:  # [1]: buffers, which no checkpoint holds
                out.append(name)
        return out

    def _refresh_tied_lm_head(self) -> None:
        """On CPUs lm_head keeps a packed copy of the tied weight, which the reload does not renew."""
        lm_head = self._tied_lm_head()
        if self.device.type == "cpu" and lm_head is not None:
            lm_head.quant_method.process_weights_after_loading(lm_head)

    def shutdown(self) -> None:
        """Let go of the group; a receive under way ends by itself and is not read."""
        self._receive = None


class WorkerChecks:
    """Mixed into vLLM's worker (`worker_extension_cls`): what can be asked of it with `collective_rpc`."""

    weight_transfer_engine: GlooEngine

    def staged_checksum(self, version: int) -> int | None:
        """Of the weights that were received and not applied yet; see `common.checksum`."""
        return self.weight_transfer_engine.staged_checksum(version)


def register() -> None:
    """Make the backend known to vLLM in this process, and its processes good neighbours on a CPU."""
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
