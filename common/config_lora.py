"""The `learner.lora` section: train low-rank adapters on a frozen base."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from common.config_section import PositiveFloat, PositiveInt, Section


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): beside each chosen matrix W, which stays as it is, two small ones are trained, and the
    policy computes with W + alpha / rank * B A. Adapters want a larger learner.optimizer.lr than whole models do."""

    rank: PositiveInt = Field(16, description="Columns of B and rows of A.")
    alpha: PositiveFloat = 32.0
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of an adapter's inputs that an update's forward pass leaves out. The sampler leaves out "
        "none, so that anything above 0 is noise in the importance ratio.",
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="all-linear: every linear layer but the language model's head; or names of such layers, as "
        "[q_proj, v_proj].",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        if isinstance(value, str) and value != "all-linear":
            raise ValueError(f"is {value!r}; use 'all-linear', or a list of layer names such as [q_proj, v_proj]")
        if isinstance(value, list | tuple):
            if not value:
                raise ValueError("is an empty list, so that nothing would train; name at least one layer")
            for name in value:
                if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*", name):
                    raise ValueError(f"holds {name!r}, which is no layer's name; use names such as q_proj")
        return value

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank
