"""The experiment trackers, each behind `MetricSink`; `common.tracking` keeps them off the critical path.

Each is made for one `Target` and may block and raise as its package does. None looks at credentials: the packages read
their own environment variables.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.checks import MLFLOW_URI
from common.config import Config
from common.config_tracking import TrackerName
from common.metrics import MetricSink

# W&B's own deadlines: for its first contact, and, also when the process ends, for what is not sent by then.
_LOGIN_S, _LAST_S = 30.0, 8.0


@dataclass(frozen=True)
class Target:
    """What a tracker writes to.

    Attributes:
        config: the run.
        part: `train` or `eval`, put before the names of metrics. Each is written by a process of its own, and a process
            needs a run of its own in every tracker: that of `eval` is `<run id>-eval`, in one group with the other.
        first: the first step that will be written; a resumed run takes back steps from there on.
        about: what else to show with the run, flat: code version, platform.
    """

    config: Config
    part: str
    first: int
    about: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        run_id = self.config.run.run_id
        return run_id if self.part == "train" else f"{run_id}-{self.part}"

    @property
    def folder(self) -> Path:
        """Where trackers keep what they write on this machine."""
        return self.config.run.folder / "tracking"

    def parameters(self) -> dict[str, Any]:
        return {**self.config.model_dump(mode="json"), "about": dict(self.about)}

    def named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {f"{self.part}/{name}": value for name, value in values.items()}


class TensorBoard:
    """Scalars in `tensorboard/`, those of another part than `train` in a folder in it: of several processes that write
    to one folder TensorBoard would read but one. Steps that were taken back are not shown any more."""

    def __init__(self, target: Target) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = target.config.run.folder / "tensorboard"
        folder = folder if target.part == "train" else folder / target.part
        self._writer, self._target = SummaryWriter(str(folder), purge_step=target.first), target
        tree = yaml.safe_dump(target.parameters(), sort_keys=False)
        self._writer.add_text("configuration", textwrap.indent(tree, "    "), target.first)  # as Markdown shows code

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in self._target.named(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A W&B run whose id is ours, so that it goes on where it was. Offline it lies in `tracking/wandb/`."""

    def __init__(self, target: Target) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # as a setting it comes too late for a line with the server's URL
        import wandb

        tracking = target.config.tracking
        target.folder.mkdir(parents=True, exist_ok=True)
        self._target = target
        self._run = wandb.init(
            project=tracking.project,
            id=target.run_id,
            name=target.run_id,
            group=target.config.run.run_id,
            resume="allow",
            dir=str(target.folder),
            config=target.parameters(),
            mode="offline" if tracking.offline else None,  # None: as WANDB_MODE says
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, init_timeout=_LOGIN_S, finish_timeout=_LAST_S
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(self._target.named(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """An MLflow run, found again by its tag `headrace.run`. Offline it lies in `tracking/mlflow.db`."""

    TAG = "headrace.run"

    def __init__(self, target: Target) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the URL may hold a password
        from mlflow import MlflowClient

        offline = target.config.tracking.offline
        target.folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{(target.folder / 'mlflow.db').resolve()}" if offline else os.environ[MLFLOW_URI]
        self._client, self._target = MlflowClient(uri), target
        place = self._experiment(target.config.tracking.project)
        found = self._client.search_runs([place], f"tags.`{self.TAG}` = '{target.run_id}'", max_results=1)
        self._id = found[0].info.run_id if found else self._create(place)
        self._client.update_run(self._id, status="RUNNING")

    def _experiment(self, name: str) -> str:
        from mlflow import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # unless the run's other process was faster
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _create(self, experiment: str) -> str:
        from mlflow.entities import Param

        tags = {self.TAG: self._target.run_id, "headrace.group": self._target.config.run.run_id}
        run_id: str = self._client.create_run(experiment, tags=tags, run_name=self._target.run_id).info.run_id
        parameters = [Param(name, str(value)[:500]) for name, value in _flat(self._target.parameters())]
        for start in range(0, len(parameters), 100):  # the server's limit
            self._client.log_batch(run_id, params=parameters[start : start + 100])
        return run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in self._target.named(values).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """A trackio run, in trackio's own folder (TRACKIO_DIR) unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    def __init__(self, target: Target) -> None:
        import trackio

        self._target = target
        self._run = trackio.init(
            project=target.config.tracking.project,
            name=target.run_id,
            group=target.config.run.run_id,
            config=dict(_flat(target.parameters())),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(self._target.named(values), step=step)

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class Kind:
    """How a tracker is made; `appends`: a step that is written twice is shown twice."""

    open: Callable[[Target], MetricSink]
    appends: bool


KINDS: dict[TrackerName, Kind] = {
    "tensorboard": Kind(TensorBoard, False),
    "wandb": Kind(Wandb, True),
    "mlflow": Kind(Mlflow, True),
    "trackio": Kind(Trackio, True),
}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found
