"""Putting received weights into a vLLM model on a CPU: into the live one while it is paused, or into a twin beside it.

What it promises: every layer gets its weights, or it is an error. A twin is loaded while the live model samples: what
takes long there, fusing and above all packing every matrix for oneDNN, costs no pause; `Twin.swap`, which does, only
hands over what is ready. A twin that is dropped has changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_ABSENT = object()


class Reload:
    """vLLM's layerwise reload of one model; from here to `finish` the model is in pieces."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self.model, self.model_config = model, model_config
        initialize_layerwise_reload(model)

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors under their Hugging Face names; vLLM may hold on to them until their layer is complete."""
        self.model.load_weights(named)  # type: ignore[operator]

    def finish(self) -> None:
        """Put the model together.

        Raises:
            RuntimeError: a layer got no weights; the model must not be used.
        """
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
        """On CPUs lm_head keeps a packed copy of the tied weight, which the reload does not renew. The embedding has
        just been packed in the same way, for nothing else: take that one."""
        lm_head = self._tied_lm_head()
        if lm_head is None:
            return
        for layer in self.model.modules():
            tied = layer is not lm_head and getattr(layer, "weight", None) is lm_head.weight
            if tied and "cpu_linear" in vars(layer):
                lm_head.cpu_linear = layer.cpu_linear
                return
        if lm_head.weight.device.type == "cpu":
            lm_head.quant_method.process_weights_after_loading(lm_head)


class Twin:
    """A second tree of the model's layers with tensors of its own, to be loaded beside the live one, once.

    Takes the memory of one more copy of the weights until `swap` or until it is dropped.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._pairs: list[tuple[torch.nn.Module, torch.nn.Module, dict[str, Any]]] = []
        self._modules: dict[torch.nn.Module, torch.nn.Module] = {}
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}  # as in the live model, a shared tensor is shared
        self._reload = Reload(self._module(model), model_config)
        self.load, self.finish = self._reload.load, self._reload.finish

    @staticmethod
    def supports(model: torch.nn.Module) -> bool:
        """Whether it is known what loading changes in this model: plain linear layers, embeddings and attention."""
        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, type(None))
        return all(
            type(getattr(layer, "quant_method", None)) in plain
            and (type(layer) is Attention or not is_deferred_attention_layer(layer))
            and all(tensor.device.type == "cpu" for tensor in layer.parameters(recurse=False))
            for layer in model.modules()
        )

    def swap(self) -> None:
        """Make the live model use what was loaded. Only between engine steps, and after `finish`."""
        with torch.no_grad():
            for live, twin, before in self._pairs:
                for table in ("_parameters", "_buffers"):
                    for name, tensor in vars(twin)[table].items():
                        if tensor is not None:
                            vars(live)[table][name].data.copy_(tensor)
                for name, value in vars(twin).items():
                    if name not in _TABLES and value is not before.get(name, _ABSENT):
                        vars(live)[name] = value  # the packed weights: `cpu_linear`

    def _module(self, live: torch.nn.Module) -> torch.nn.Module:
        if live in self._modules:
            return self._modules[live]
        twin = self._modules[live] = object.__new__(type(live))
        before = vars(live).copy()
        vars(twin).update(before)
        tables = vars(twin)
        tables["_non_persistent_buffers_set"] = live._non_persistent_buffers_set.copy()
        tables["_modules"] = {name: child and self._module(child) for name, child in live._modules.items()}
        for table in ("_parameters", "_buffers"):
            tables[table] = {name: None if t is None else self._tensor(t) for name, t in before[table].items()}
        self._metadata(live, twin)
        self._pairs.append((live, twin, before))
        return twin

    def _tensor(self, live: torch.Tensor) -> torch.Tensor:
        if live not in self._tensors:
            self._tensors[live] = _like(live, live.data.clone())
        return self._tensors[live]

    @staticmethod
    def _metadata(live: torch.nn.Module, twin: torch.nn.Module) -> None:
        """Tell vLLM what the twin's tensors look like before processing, with loaders that are the twin's own."""
        ours, theirs = get_layerwise_info(twin), get_layerwise_info(live)
        ours.restore_device = theirs.restore_device
        for mine, table in zip(ours.restore_metadata, theirs.restore_metadata, strict=True):
            for name, meta in table.items():
                mine[name] = tensor = _like(meta, meta.data)
                loader = getattr(meta, "weight_loader", None)
                while loader is not None and loader.__name__ == "online_process_loader":
                    loader = loader.__wrapped__  # left over from an earlier reload of the live model
                if isinstance(loader, MethodType) and not (
                    isinstance(loader.__self__, torch.nn.Module) and loader.__self__ is not live
                ):
                    loader = MethodType(loader.__func__, twin)
                if loader is not None:
                    tensor.weight_loader = loader  # type: ignore[attr-defined]


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` with the class and attributes of `tensor`, vLLM's parameters among them."""
    data.__class__ = tensor.__class__  # type: ignore[assignment]
    data.__dict__ = copy.copy(tensor.__dict__)
    return data
