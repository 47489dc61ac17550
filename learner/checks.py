"""Start-up checks of the learner that load no model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from common.config import Config, LoraConfig
from common.errors import ConfigError
from learner import choices


def check(config: Config) -> None:
    """Raises ConfigError where this machine cannot do what the `learner` and `weights` sections ask for."""
    if config.weights.backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("weights.backend: 'nccl' needs a GPU and none is visible; use 'auto' or 'gloo'")
    choices.check(config)
    if config.learner.zero_stage == 0 and config.learner.dtype == "bfloat16":
        raise ConfigError(
            "learner.zero_stage: 0 with learner.dtype bfloat16 keeps no float32 master weights; use stage 1 or more"
        )
    if config.learner.lora is not None:
        _check_lora(config.learner.lora, Path(config.model.path))
    if config.learner.sequence_parallel > 1:
        _check_heads(config.learner.sequence_parallel, Path(config.model.path))
    reference = config.objective.reference
    if reference is not None and not (Path(reference) / "config.json").is_file():
        raise ConfigError(f"objective.reference: {reference!r} has no config.json; expected the folder of a model")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("learner: the package deepspeed is not installed; install requirements/cpu.txt or gpu.txt")


def _check_heads(size: int, model: Path) -> None:
    """Can so many ranks share the model's heads out among them? One on the hub is looked at when it is loaded."""
    file = model / "config.json"
    if not file.is_file():
        return
    from learner.sequence import check_heads  # imports torch

    settings = json.loads(file.read_text(encoding="utf-8"))
    settings = settings.get("text_config", settings)
    if heads := settings.get("num_attention_heads"):
        check_heads(size, heads, settings.get("num_key_value_heads") or heads)


def _check_lora(lora: LoraConfig, model: Path) -> None:
    """Do the layers that are named exist? A model on the hub is looked at when it is loaded."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("learner.lora: the package peft is not installed; install requirements/cpu.txt or gpu.txt")
    from learner import tensorfile  # imports torch

    weights = {name: shape for file in model.glob("*.safetensors") for name, shape in tensorfile.shapes(file).items()}
    matrices = {name.removesuffix(".weight") for name, shape in weights.items() if len(shape) == 2}
    for target in () if lora.target_modules == "all-linear" or not matrices else lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in matrices):
            names = sorted({name.rpartition(".")[2] for name in matrices} - {"lm_head", "embed_tokens"})
            raise ConfigError(
                f"learner.lora.target_modules: {target!r} is no layer of {str(model)!r}; it has {', '.join(names)}"
            )
