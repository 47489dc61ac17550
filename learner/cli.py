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
    """Run the learner: this process becomes torchrun's agent, which starts `learner.ranks` workers."""
    resolved = load_config(config, overrides)
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.learner.threads))
    arguments = [str(config), *(f"--set={override}" for override in overrides or []), *(["--resume"] if resume else [])]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={resolved.learner.ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "learner.main", *arguments])
