"""The `learner.elastic` section: a learner of nodes that come and go."""

from __future__ import annotations

from pydantic import Field, model_validator

from common.config_section import PositiveFloat, PositiveInt, Section


class ElasticConfig(Section):
    """Nodes that may come and go while the run goes on. A node is one `headrace learner`, of `learner.ranks` ranks."""

    min_nodes: PositiveInt = Field(1, description="Fewer nodes than this wait for others: the least one would accept.")
    max_nodes: PositiveInt = Field(8, description="Nodes beyond this wait until another one leaves.")
    store_host: str | None = Field(
        None, description="Address of the broker service for the nodes. Null: that from which it reaches Redis."
    )
    store_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the broker service where nodes meet. Null: any; nodes ask Redis."
    )
    grace_s: PositiveFloat = Field(
        100.0, description="Time a node has to finish its step and save before it leaves; then its ranks are killed."
    )
    max_failures: PositiveInt = Field(
        5, description="Failures of a node in a row, without a newly durable group in between, before it gives up."
    )

    @model_validator(mode="after")
    def _range(self) -> ElasticConfig:
        if self.max_nodes < self.min_nodes:
            raise ValueError(
                f"max_nodes is {self.max_nodes}, less than min_nodes ({self.min_nodes}); use at least {self.min_nodes}"
            )
        return self
