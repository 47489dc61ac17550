"""The `objective` section of the configuration: the loss, its correction, and what is optional in it.

`docs/objective.md` maps the fields to formulas and sources.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from common.config_section import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.1
    grad_clip: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up.")


class CorrectionConfig(Section):
    """Importance correction between the sampler (behaviour policy) and the learner (proximal policy)."""

    mode: Literal["decoupled", "bypass", "none"] = Field(
        "decoupled",
        description="Where the whole section is left out and learner.updates_per_batch is 1: bypass (docs/objective.md "
        "says why).",
    )
    level: Literal["token", "sequence"] = "token"
    proximal: Literal["recomputed", "interpolated"] = Field(
        "recomputed",
        description="recomputed: by a forward pass before the updates, where one is needed; interpolated: between mu "
        "and theta by the token's staleness, without a pass (A-3PO), only with mode decoupled and without masks.",
    )
    cap: PositiveFloat = Field(2.0, description="Upper truncation C of the importance weight.")
    token_mask: tuple[float, float] | None = Field(None, description="Mask tokens whose prox/mu leaves [low, high].")
    sequence_mask: tuple[float, float] | None = Field(
        None, description="Mask sequences whose geometric-mean prox/mu leaves [low, high]."
    )

    @field_validator("token_mask", "sequence_mask")
    @classmethod
    def _band(cls, band: tuple[float, float] | None) -> tuple[float, float] | None:
        if band is not None and not 0 <= band[0] <= 1 <= band[1]:
            raise ValueError("must be [low, high] with 0 <= low <= 1 <= high")
        return band

    @model_validator(mode="after")
    def _interpolation(self) -> CorrectionConfig:
        if self.proximal == "interpolated":
            if self.mode != "decoupled":
                raise ValueError(
                    f"proximal is 'interpolated' and mode is '{self.mode}'; use mode 'decoupled', or proximal "
                    "'recomputed'"
                )
            if self.token_mask or self.sequence_mask:
                raise ValueError(
                    "token_mask and sequence_mask judge prox/mu before the updates, where proximal 'interpolated' has "
                    "no prox yet; use proximal 'recomputed', or set both masks to null"
                )
        return self


class GroupAdvantage(Section):
    """Advantages relative to the group (DAPO, GRPO); no critic."""

    type: Literal["group"] = "group"


class CriticOptimizer(OptimizerConfig):
    """AdamW of the critic."""

    lr: PositiveFloat = 1e-5


class GaeAdvantage(Section):
    """PPO with a critic: generalised advantage estimation over the response tokens. The critic is a copy of the model
    with a scalar head, held and trained by the learner beside the policy; objective.normalize_by_std is not used."""

    type: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Weight of longer returns; 1: no bootstrapping.")
    whiten: bool = Field(True, description="Give the advantages of the batch's trained tokens mean 0 and deviation 1.")
    value_clip: PositiveFloat | None = Field(
        0.5, description="How far a value may move from that before the batch and still lower its loss; null: off."
    )
    optimizer: CriticOptimizer = CriticOptimizer()


AdvantageConfig = Annotated[GroupAdvantage | GaeAdvantage, Field(discriminator="type")]


class ObjectiveConfig(Section):
    """The loss. Defaults are DAPO's published recipe."""

    ratio: Literal["token", "gspo", "cispo"] = "token"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: float | None = Field(10.0, gt=1, description="Bound c of the loss for negative advantages; null: off.")
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "prompt_token_mean"
    ] = "token_mean"
    normalize_by_std: bool = Field(True, description="Divide group advantages by the group's standard deviation.")
    overlong_filter: bool = Field(False, description="Truncated responses leave the loss.")
    overlong_cache_tokens: NonNegativeInt = Field(
        0, description="L_cache of the soft overlong punishment, in tokens before sampling.max_response_tokens; 0: off."
    )
    kl_coefficient: NonNegativeFloat = Field(
        0.0, description="Weight of the KL term to a frozen reference model, which every rank then holds; 0: off."
    )
    reference: str | None = Field(
        None, description="Model folder of the reference; null: model.path, which the run starts from."
    )
    entropy_bonus: NonNegativeFloat = Field(0.0, description="Weight of the policy's entropy in the loss; 0: off.")
    advantage: AdvantageConfig = GroupAdvantage()
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="after")
    def _reference_is_used(self) -> ObjectiveConfig:
        if self.reference is not None and self.kl_coefficient == 0:
            raise ValueError(
                f"reference is {self.reference!r} and kl_coefficient is 0, so that nothing would read it; use a "
                "kl_coefficient above 0, or reference null"
            )
        return self
