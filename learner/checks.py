"""Start-up checks of the learner that load no model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from common.config import Config
from common.errors import ConfigError


def check(config: Config) -> None:
    """Raises ConfigError where this machine cannot do what the `learner` and `weights` sections ask for."""
    if config.weights.backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("weights.backend: 'nccl' needs a GPU and none is visible; use 'auto' or 'gloo'")
    if config.learner.zero_stage == 0 and config.learner.dtype == "bfloat16":
        raise ConfigError(
            "learner.zero_stage: 0 with learner.dtype bfloat16 keeps no float32 master weights; use stage 1 or more"
        )
    reference = config.objective.reference
    if reference is not None and not (Path(reference) / "config.json").is_file():
        raise ConfigError(f"objective.reference: {reference!r} has no config.json; expected the folder of a model")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("learner: the package deepspeed is not installed; install requirements/cpu.txt or gpu.txt")
