"""LoRA in the learner: adapters put into the policy by PEFT, and everything that is different with them.

What it promises: only adapters carry gradients, optimizer state and checkpoints; the model keeps its class, its head
and its forward, so that packing, ZeRO and the fused head know nothing of it. Files are in PEFT's own format
(`adapter_config.json`, `adapter_model.safetensors`): PEFT and vLLM load a checkpoint's `adapter/` as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from common.config import LoraConfig
from common.errors import ConfigError
from common.lora import A, Adapter, B, base_checksum, merged

FOLDER = "adapter"
_NAME = "default"  # of the one adapter, in PEFT's names of its parameters
_ROOT = "base_model.model."  # what PEFT's files put before a model's own names


def add(model: Any, settings: LoraConfig) -> Adapter:
    """Put adapters into a causal language model that is whole on this rank, and freeze everything else.

    The adapters start at B A = 0 (A random, by torch's generator) in float32.

    Raises:
        ConfigError: `target_modules` names a layer that the model lacks, or one that is no linear layer or the head.
    """
    from peft import inject_adapter_in_model

    _check_targets(model, settings)
    inject_adapter_in_model(peft_config(settings, ""), model, adapter_name=_NAME)
    if model.is_gradient_checkpointing:
        model.enable_input_require_grads()  # else nothing that a checkpointed block is given has a gradient
    return Adapter(settings.scale, base_checksum((f"{name}.weight", base(layer)) for name, layer in layers(model)))


def peft_config(settings: LoraConfig, path: str) -> Any:
    """PEFT's description of the adapter on the model `path`."""
    from peft import LoraConfig as PeftConfig

    targets = settings.target_modules
    return PeftConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def _check_targets(model: Any, settings: LoraConfig) -> None:
    if settings.target_modules == "all-linear":
        return
    head = model.get_output_embeddings()
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head}
    for target in settings.target_modules:
        found = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        if not found or not linear.issuperset(found):
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"learner.lora.target_modules: {target!r} is no linear layer of the model below its head; it has "
                f"{', '.join(names)}"
            )


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and PEFT layer of everything that has an adapter."""
    from peft.tuners.lora import LoraLayer

    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))


def base(layer: Any) -> Any:
    """The frozen weight below an adapter."""
    return layer.get_base_layer().weight


def factors(layer: Any) -> tuple[Any, Any]:
    """A (rank, in) and B (out, rank)."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """The model computes as its base does. The same layers run as ever, as ZeRO-3's prefetching wants it."""
    for _, layer in layers(model):
        layer.set_scale(_NAME, 0.0)
    try:
        yield
    finally:
        for _, layer in layers(model):
            layer.set_scale(_NAME, 1.0)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Score as the sampler does: with all inputs."""
    dropouts = [drop for _, layer in layers(model) for drop in layer.lora_dropout.values()]
    for drop in dropouts:
        drop.eval()
    try:
        yield
    finally:
        for drop in dropouts:
            drop.train()


def wire(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """For every factor its name on the wire and the parameter, alone in a list (see `whole`)."""
    for name, layer in layers(model):
        a, b = factors(layer)
        yield f"{name}.{A}", [a]
        yield f"{name}.{B}", [b]


def whole(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """For every weight of the merged model its Hugging Face name and the parameters `sum_of` makes it from: itself, or
    base, A and B."""
    adapted = {id(base(layer)): factors(layer) for _, layer in layers(model)}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), [parameter, *adapted.get(id(parameter), ())]


def sum_of(parameters: list[Any], scale: float) -> Tensor:
    """The weight that these are the parameters of."""
    first: Tensor = parameters[0].detach()
    return first if len(parameters) == 1 else merged(first, parameters[1].detach(), parameters[2].detach(), scale)


def saved_name(name: str) -> str:
    """A parameter's name in a checkpoint: the model's own, an adapter's in PEFT's way."""
    return _ROOT + name.replace(f".{_NAME}.", ".") if ".lora_" in name else name


def wire_name(name: str) -> str:
    """`saved_name` back to that on the wire."""
    return name.removeprefix(_ROOT)


def write_config(settings: LoraConfig, path: str, folder: Path) -> None:
    """`adapter_config.json`, with an absolute path where the base is a folder."""
    found = Path(path)
    config = peft_config(settings, str(found.resolve()) if found.is_dir() else path)
    config.inference_mode = True
    config.save_pretrained(folder)
