"""Which run a command means: a given id, the configured one, or the newest folder that `headrace up` made."""

from __future__ import annotations

import re
import time
from pathlib import Path

from common.config import Config, RunConfig
from common.environment import CONFIG
from common.errors import ConfigError


def new_run_id(name: str) -> str:
    """An id made from a run's name and the local time, to the second."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def newest_run_id(run: RunConfig) -> str | None:
    """Id of the newest run of this name under `run.dir`, or None. Runs with ids of other shapes are not its own."""
    shape = re.compile(re.escape(run.name) + r"(-\d{8}-\d{6})?")
    folders = [path for path in run.dir.glob(f"{run.name}*") if path.is_dir() and shape.fullmatch(path.name)]
    return max(folders, key=_age_key).name if folders else None


def _age_key(path: Path) -> tuple[float, str]:
    """When it was begun or resumed: its `config.yaml` is written then, the folder itself changes when it ends, too."""
    written = path / CONFIG
    return (written if written.is_file() else path).stat().st_mtime, path.name


def with_run_id(config: Config, run_id: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id})})


def existing_run(config: Config, run_id: str | None) -> Config:
    """`config` with the id of the run a reading command is about.

    Raises:
        ConfigError: no id is given or configured, the server is `up`'s own, and there is no folder of such a run.
    """
    chosen = run_id or config.run.id or newest_run_id(config.run)
    if chosen is None and config.broker.address is None:
        there = sorted((path.parent for path in config.run.dir.glob(f"*/{CONFIG}")), key=_age_key, reverse=True)
        known = f"; the newest there: {', '.join(path.name for path in there[:5])}" if there else ""
        raise ConfigError(f"{config.run.dir}: no run named {config.run.name!r} there; give its id with --run-id{known}")
    return with_run_id(config, chosen or config.run.run_id)
