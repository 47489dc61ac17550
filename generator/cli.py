"""`headrace generator` and `headrace eval`."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from common import log as logs
from common import settings
from common.cli import ConfigPath, Overrides, load_config
from common.config import Config
from common.errors import ConfigError


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
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG|MODEL", help="A run's YAML file, or a model folder (with --prompts).")
    ],
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Override fields, as --set does.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="With a model folder: .parquet or .jsonl file, or hub name of a data set.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="With a model folder: math_dapo (the default) or math_verify.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder to evaluate instead of the configured one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure a model on held-out problems: avg@k, pass@k and majority@k, each with a 95 % interval."""
    resolved = _evaluated(config, [*(overrides or []), *(fields or [])], prompts, reward, model)
    # Of the start-up checks those that concern it: an evaluation needs neither Redis nor a learner.
    from broker.sources import check_source
    from generator.checks import check

    check_source(resolved)
    check(resolved)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # this one runs on the user's console
    from rich.console import Console

    from generator.evalreport import Bar, show
    from generator.evaluate import described, evaluation_source, run_evaluation

    source = evaluation_source(resolved)
    assert resolved.eval is not None
    typer.echo(described(resolved, source))
    with Bar(min(resolved.eval.limit, len(source))) as bar:
        result = asyncio.run(run_evaluation(resolved, source, bar.advance))
    show(result, Console(highlight=False))
    if out is not None:
        result.save(out)


def _evaluated(
    path: Path, overrides: list[str], prompts: str | None, reward: str | None, model: str | None
) -> Config:
    """The configuration to evaluate, from a YAML file or made up for a model folder."""
    if (path / "config.json").is_file():
        if prompts is None:
            raise ConfigError(f"{path} is a model folder; give the problems with --prompts FILE")
        if model is not None:
            raise ConfigError(f"--model {model}: {path} is a model folder already; give one of the two")
        from generator.evalconfig import config_for_model

        return config_for_model(path, prompts, reward or "math_dapo", overrides)
    for option, value in (("--prompts", prompts), ("--reward", reward)):
        if value is not None:
            raise ConfigError(
                f"{option} {value}: only with a model folder (one that holds config.json), and {path} is none; a "
                f"configuration says it in {'eval.prompts' if option == '--prompts' else 'reward'}"
            )
    return settings.load(path, [*overrides, *([f"model.path={model}"] if model else [])])
