"""What a run's processes show over HTTP."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.config_section import PositiveFloat, Section


class MetricsConfig(Section):
    """`/metrics` for Prometheus, `/healthz` and `/readyz` for probes, on every process of a run."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Null: not served. `headrace up` counts up from it, a port per process, in order."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 in a pod.")
    stalled_s: PositiveFloat = Field(
        900.0, description="A process without progress for so long is not healthy; more than a step takes."
    )
