"""The `learner` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.config_elastic import ElasticConfig
from common.config_lora import LoraConfig
from common.config_objective import OptimizerConfig
from common.config_section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class LearnerConfig(Section):
    """The DeepSpeed learner."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    ranks: PositiveInt = Field(1, description="Ranks on a node.")
    sequence_parallel: PositiveInt = Field(
        1,
        description="Consecutive ranks of a node that share every micro-batch, a part of its tokens each (Ulysses), so "
        "that sequences may be as many times longer. Divides ranks and the model's attention heads.",
    )
    elastic: ElasticConfig | None = Field(None, description="Nodes that come and go. Null: one node, which stays.")
    groups_per_step: PositiveInt = 8
    tokens_per_step: PositiveInt | None = Field(
        None,
        description="A step is full before that once its groups hold so many response tokens, so that long answers do "
        "not make long steps; the group that reaches it is in. The release budget goes on counting groups_per_step. "
        "Null: groups alone count. Not with expired_tokens: wait, nor with max_staleness 0.",
    )
    updates_per_batch: PositiveInt = Field(1, description="Optimizer updates per batch (mini-batches).")
    micro_batch_tokens: PositiveInt = Field(8192, description="Hard limit of a rank's tokens in a micro-batch.")
    max_steps: PositiveInt = 1000
    checkpoint_every: PositiveInt = Field(100, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = 2
    snapshot_every: NonNegativeInt = Field(
        10, description="Steps between snapshots, checkpoints written to snapshot_folder; 0: none."
    )
    keep_snapshots: PositiveInt = 2
    snapshot_folder: Path | None = Field(
        None,
        description="Fast storage that survives what the run has to survive; a folder per run is made in it. Null: "
        "snapshots/ in the run's folder.",
    )
    settle_on: Literal["snapshot", "checkpoint", "step"] = Field(
        "snapshot",
        description="When trained groups leave Redis. snapshot: when a snapshot or checkpoint that contains them is "
        "durable; a crash trains them again. checkpoint: the same, but a snapshot is not enough. step: right after "
        "their step; a crash loses what the last snapshot lacks.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = Field(None, description="Adapters on a frozen base. Null: the whole model is trained.")
    gradient_checkpointing: bool = False
    attention: Literal["auto", "blocks", "sdpa"] = Field(
        "auto",
        description="auto: blocks. blocks: a group of a packed row at a time. sdpa: the whole row with its mask, for "
        "comparison. Flash attention knows no mask in which responses share a prompt.",
    )
    compile: Literal["off", "layers"] = Field(
        "off", description="layers: torch.compile of every layer but its attention; not with zero_stage 3."
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="What a rank's device can do at most in this dtype, dense, in TFLOP/s; `mfu` is a share of it. "
        "Null: known of NVIDIA's data centre GPUs in bfloat16; of others there is no mfu.",
    )
    threads: PositiveInt = Field(1, description="OpenMP threads per rank; matters on CPUs.")

    @model_validator(mode="after")
    def _together(self) -> LearnerConfig:
        if self.ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel is {self.sequence_parallel}, which does not divide ranks ({self.ranks}); ranks "
                "that share micro-batches are on one node: use a divisor of it"
            )
        if self.sequence_parallel > 1 and self.attention == "sdpa":
            raise ValueError(
                f"attention is 'sdpa', which needs whole rows, and sequence_parallel is {self.sequence_parallel}; use "
                "'blocks', or sequence_parallel 1"
            )
        if self.compile != "off" and self.zero_stage == 3:
            raise ValueError(
                f"compile is {self.compile!r}, and zero_stage is 3, whose hooks gather a layer's parameters while it "
                "runs; use compile 'off', or zero_stage 2"
            )
        return self

    @property
    def row_tokens(self) -> int:
        """Hard limit of tokens in a micro-batch."""
        return self.micro_batch_tokens * self.sequence_parallel
