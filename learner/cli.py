"""`headrace learner`: a node of the learner, or the only one."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from common.cli import ConfigPath, Overrides, load_config


def learner(
    config: ConfigPath,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run a node of the learner: torchrun's agent with `learner.ranks` ranks. With `learner.elastic` as many nodes as
    that says may run, and come and go; they always continue from the newest checkpoint."""
    resolved = load_config(config, overrides)
    os.environ.setdefault("OMP_NUM_THREADS", str(resolved.learner.threads))
    # A lost peer is one line of ours, not a stack trace of torch's.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from learner.node import main

    arguments = [str(config), *(f"--set={override}" for override in overrides or []), *(["--resume"] if resume else [])]
    raise typer.Exit(main(resolved, ["-u", "-m", "learner.main", *arguments]))
