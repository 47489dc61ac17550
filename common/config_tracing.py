"""Which prompts' lives are traced, and where the spans go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from common.config_section import Section


class TracingConfig(Section):
    """Traces of prompts' lives, which `headrace trace` shows and the broker service sends as OpenTelemetry spans."""

    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of the prompts whose lives are traced, chosen by a hash of the id; 0: none, at no cost."
    )
    endpoint: str | None = Field(
        None, description="OTLP over HTTP, such as http://collector:4318/v1/traces. Null: spans are sent nowhere."
    )

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://, as http://collector:4318/v1/traces")
        if endpoint is not None and "@" in endpoint:
            raise ValueError("must not contain a user or password: use OTEL_EXPORTER_OTLP_HEADERS")
        return endpoint
