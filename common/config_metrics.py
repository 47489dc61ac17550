"""What a run's processes show over HTTP, and how many generators it asks for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from common.config_section import PositiveFloat, PositiveInt, Section


class MetricsConfig(Section):
    """`/metrics` for Prometheus, `/healthz` and `/readyz` for probes, on every process of a run."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Null: not served. `headrace up` counts up from it, a port per process, in order."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 in a pod.")
    stalled_s: PositiveFloat = Field(
        900.0, description="A process without progress for so long is not healthy; more than a step takes."
    )


class AutoscaleConfig(Section):
    """The wish for generators that the broker service shows as `headrace_generators_desired`."""

    min: PositiveInt = 1
    max: PositiveInt = 32
    headroom: float = Field(1.0, ge=0.95, le=1.05, description="Above 1 the learner waits less, below 1 generators do.")

    @model_validator(mode="after")
    def _range(self) -> AutoscaleConfig:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, less than min ({self.min}); use at least {self.min}")
        return self
