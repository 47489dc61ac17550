"""Which experiment trackers take a run's metrics besides `metrics.jsonl`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from common.config_section import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingConfig(Section):
    """Experiment trackers. Where their servers are and how one logs in is read by each package from its own environment
    variables; see the page on operations."""

    trackers: list[TrackerName] = Field(
        ["tensorboard"], description="Any of them; all but tensorboard need an extra, as in headrace[wandb]."
    )
    project: str = Field(
        "headrace", pattern=r"^[\w.-]{1,64}$", description="W&B's and trackio's project, MLflow's experiment."
    )
    offline: bool = Field(
        False, description="W&B and MLflow write into the run's folder, trackio to its own; nothing leaves the machine."
    )

    @field_validator("trackers")
    @classmethod
    def _once(cls, trackers: list[TrackerName]) -> list[TrackerName]:
        if len(set(trackers)) < len(trackers):
            raise ValueError("names a tracker twice; name each once")
        return trackers
