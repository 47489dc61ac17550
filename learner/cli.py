"""`headrace learner`: the learner's ranks under torchrun."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from common.cli import ConfigPath, Overrides, load_config


def learner(
    config: ConfigPath,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run the learner: this process becomes torchrun's agent, which starts `learner.ranks` workers. With torchrun's own
    variables (PET_RDZV_ENDPOINT and so on) it is one node of several that meet there."""
    resolved = load_config(config, overrides)
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.learner.threads))
    arguments = [str(config), *(f"--set={override}" for override in overrides or []), *(["--resume"] if resume else [])]
    alone = [] if os.environ.get("PET_RDZV_ENDPOINT") else ["--standalone"]
    torchrun = ["-m", "torch.distributed.run", *alone, f"--nproc-per-node={resolved.learner.ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "learner.main", *arguments])
