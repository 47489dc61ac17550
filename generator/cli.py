"""`headrace generator` and `headrace eval`."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from common import log as logs
from common.cli import ConfigPath, Overrides, load_config


def generator(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run one generator of a fleet; its name is HEADRACE_GENERATOR_ID, else host name and process id."""
    resolved = load_config(config, overrides)
    generator_id = os.environ.get("HEADRACE_GENERATOR_ID") or f"{socket.gethostname()}-{os.getpid()}"
    log = logs.setup(resolved.run.run_id, generator_id)
    from broker import Broker
    from generator.loop import Generator

    async def run() -> None:
        await Generator(resolved, generator_id, Broker.connect(resolved), log).run()

    asyncio.run(run())


def evaluate(
    config: ConfigPath,
    model: Annotated[str | None, typer.Option(help="Model folder to evaluate instead of the configured one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure held-out accuracy of a model on the prompts of the `eval` section."""
    resolved = load_config(config, overrides, [f"model.path={model}"] if model else None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # this one runs on the user's console
    from generator.evaluate import run_evaluation

    result = asyncio.run(run_evaluation(resolved))
    typer.echo(result.summary())
    if out is not None:
        result.save(out)
