"""The configuration of a run: one YAML file, read by every process, each looking at its own section.

Unknown keys, impossible values and impossible combinations are refused here, with the field's name, the value and what
would be right. What needs the file system, the network or a library (does the model folder exist, does the reward
import) is checked by each room's `checks.py` before any process takes a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config_broker import SentinelConfig as SentinelConfig
from common.config_broker import TlsConfig as TlsConfig
from common.config_broker import check_url, scheme
from common.config_elastic import ElasticConfig as ElasticConfig
from common.config_learner import LearnerConfig as LearnerConfig
from common.config_lora import LoraConfig as LoraConfig
from common.config_metrics import AutoscaleConfig as AutoscaleConfig
from common.config_metrics import MetricsConfig as MetricsConfig
from common.config_objective import CorrectionConfig as CorrectionConfig
from common.config_objective import GaeAdvantage as GaeAdvantage
from common.config_objective import ObjectiveConfig
from common.config_objective import OptimizerConfig as OptimizerConfig
from common.config_page import PageConfig as PageConfig
from common.config_section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from common.config_tracing import TracingConfig as TracingConfig
from common.config_tracking import TrackingConfig as TrackingConfig


class RunConfig(Section):
    """Name, place and seed of a run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Prefix of the run id: a-z, 0-9 and '-'.")
    id: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9-]{0,95}$",
        description="Identity of the run in Redis and on disk. `headrace up` makes one from name and time; processes "
        "started one by one must share it and fall back to the name.",
    )
    dir: Path = Field(Path("runs"), description="Folder that holds a folder per run.")
    seed: NonNegativeInt = 0

    @property
    def run_id(self) -> str:
        return self.id or self.name

    @property
    def folder(self) -> Path:
        return self.dir / self.run_id


class ModelConfig(Section):
    """The policy: any Hugging Face causal language model."""

    path: str = Field(description="Local folder or hub name.")
    trust_remote_code: bool = False
    chat_template: bool = Field(True, description="Apply the tokenizer's chat template to prompts given as messages.")


class ReasoningGymPrompts(Section):
    """Procedurally generated tasks of the reasoning-gym package."""

    type: Literal["reasoning_gym"]
    task: str = Field(description="Name of the task, for example chain_sum.")
    options: dict[str, Any] = Field(default_factory=dict, description="Passed to the task's generator.")
    size: PositiveInt = 10_000
    seed: NonNegativeInt = 0
    system: str | None = Field(None, description="System message; null leaves it to the chat template.")
    suffix: str = Field("", description="Appended to every question.")


class DatasetPrompts(Section):
    """A Hugging Face data set, Parquet or JSONL, in the `prompt`-column convention or the DAPO schema."""

    type: Literal["dataset"]
    path: str = Field(description="Hub name, local data-set folder, .parquet, .jsonl or .json file.")
    split: str = "train"
    prompt_column: str = "prompt"
    deduplicate: bool = Field(True, description="Drop rows whose prompt text was seen before, and say how many.")
    system: str | None = None
    suffix: str = ""


PromptsConfig = Annotated[ReasoningGymPrompts | DatasetPrompts, Field(discriminator="type")]


class BaseReward(Section):
    timeout_s: PositiveFloat = Field(10.0, description="Deadline of one scoring call; a late one is a data failure.")
    workers: PositiveInt = Field(1, description="Worker processes that score.")


class NamedReward(BaseReward):
    """A reward that ships with Headrace. `math_dapo` is the recipe's strict rule; `math_verify` is forgiving."""

    type: Literal["math_dapo", "math_verify"]


class ReasoningGymReward(BaseReward):
    """The task's own scoring, between 0 and 1."""

    type: Literal["reasoning_gym"]
    extract: str | None = Field(
        None,
        description="Regular expression; the answer is its last match in the completion. Null: the whole completion.",
    )

    @field_validator("extract")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"must be a regular expression: {error}") from None
        return pattern


class FunctionReward(BaseReward):
    """A reward of one's own: `f(prompts, completions, **columns) -> list[float | None]`, sync or async."""

    type: Literal["function"]
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$", description="package.module:function")
    correct_at: float | None = Field(
        None,
        description="A raw reward of at least this is a correct response. Null: correctness is unknown, and a group is "
        "uninformative when all its rewards are equal.",
    )


RewardConfig = Annotated[NamedReward | ReasoningGymReward | FunctionReward, Field(discriminator="type")]


class SamplingConfig(Section):
    """How trajectories are sampled. Training keeps top_p = 1 and top_k off: anything else renormalises the sampler's
    distribution and the importance ratio loses its meaning."""

    group_size: PositiveInt = Field(8, description="Responses per prompt.")
    temperature: PositiveFloat = 1.0
    max_prompt_tokens: PositiveInt = 512
    max_response_tokens: PositiveInt = 512
    dynamic_sampling: bool = Field(True, description="Drop groups that are all correct or all wrong.")
    max_generation_factor: PositiveInt = Field(
        10, description="Batches' worth of groups that dynamic sampling may drop before one is full without a warning."
    )


class GeneratorConfig(Section):
    """One vLLM generator."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    prompts_in_flight: PositiveInt = Field(8, description="Prompts leased at a time.")
    kv_cache_mb: PositiveInt | None = Field(None, description="Size of the KV cache; null leaves it to vLLM.")
    block_size: PositiveInt | None = Field(
        None,
        description="Tokens per KV-cache block; a group's responses share their prompt in whole blocks. Null leaves it "
        "to vLLM: 128 on CPUs, where it must be a multiple of 32, so that shorter prompts are not shared at all.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel_size: PositiveInt = 1
    max_num_seqs: PositiveInt = 256
    enforce_eager: bool = False
    threads: PositiveInt = Field(1, description="CPU build only: OpenMP threads of the engine.")
    handoff_tokens: NonNegativeInt = Field(
        256,
        description="Tokens by which a response grows before what there is of it is kept in the broker: what a "
        "generator that is killed loses of it at most. 0: nothing is kept before a generator leaves in good order.",
    )


class BrokerConfig(Section):
    """Where Redis or Valkey is and how leases behave."""

    url: str | None = Field(
        None,
        description="redis://, rediss:// or unix:// URL, or redis+sentinel://host:port[,host:port]/service "
        "(rediss+sentinel:// for TLS). Null: `headrace up` starts a Valkey server of its own.",
    )
    sentinel: SentinelConfig | None = Field(None, description="Instead of a redis+sentinel:// URL.")
    cluster: bool = Field(False, description="The URL is that of a node of a cluster.")
    user: str | None = Field(None, pattern=r"^\S+$", description="ACL user; null: HEADRACE_REDIS_USER, or default.")
    password_file: Path | None = Field(None, description="File that holds the password; never put it in the URL.")
    tls: TlsConfig | None = None
    reconnect_s: PositiveFloat = Field(120.0, description="A process ends after this long without a server.")
    max_bytes: PositiveInt | None = Field(
        None, description="Generators hold their groups back while those in the server take more; null: maxmemory does."
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port of `up`'s server; null: unix socket only.")
    maxmemory_mb: PositiveInt = Field(1024, description="Memory limit of the server `up` starts.")
    heartbeat_s: PositiveFloat = 1.0
    member_ttl_s: PositiveFloat = Field(10.0, description="A member silent for this long is gone.")
    lease_ttl_s: PositiveFloat = Field(120.0, description="A leased prompt not renewed for this long is taken back.")
    max_attempts: PositiveInt = Field(3, description="Data failures of one prompt before it is dead-lettered.")

    @field_validator("url")
    @classmethod
    def _reachable(cls, url: str | None) -> str | None:
        return url if url is None else check_url(url)

    @model_validator(mode="after")
    def _one_way(self) -> BrokerConfig:
        if self.url and self.sentinel:
            raise ValueError("url and sentinel are both set; use one of them")
        if self.cluster and (self.sentinel or (self.url and scheme(self.url) not in ("redis", "rediss"))):
            raise ValueError("cluster is true: use a redis:// or rediss:// url of one of its nodes, and no sentinel")
        if self.tls and self.url and not self.url.startswith("rediss"):
            raise ValueError(f"tls is set and url is {scheme(self.url)}://; use rediss://, or leave tls out")
        if self.user and self.url and "@" in self.url:
            raise ValueError("user is set and the url names one too; use one of them")
        return self

    @property
    def address(self) -> str | None:
        """URL of the configured server, sentinels included; None where none is configured."""
        if self.sentinel is None:
            return self.url
        kind = "rediss" if self.tls else "redis"
        return f"{kind}+sentinel://{','.join(self.sentinel.hosts)}/{self.sentinel.service}"


class StalenessConfig(Section):
    """How old, in policy versions, a token may be when it enters an optimizer step."""

    max_staleness: NonNegativeInt = 2
    expired_tokens: Literal["mask", "drop", "wait"] = Field(
        "mask",
        description="mask: tokens that are too old leave the loss; drop: their whole group goes, and its prompt is "
        "sampled again; wait: no token gets too old, since the learner waits for the oldest prompts.",
    )

    @property
    def sampling_lag(self) -> int:
        """How many versions older than the learner's at a prompt's release the weights may be that begin to sample it.

        0 with `wait`: its deadlines count from the release."""
        return 0 if self.expired_tokens == "wait" else self.max_staleness


class WeightsConfig(Section):
    """How new weights reach the generators."""

    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl where there is a GPU, else gloo.")
    bucket_mb: PositiveInt = 64
    timeout_s: PositiveFloat = Field(30.0, description="Deadline of one broadcast.")
    host: str | None = Field(
        None,
        description="Address of the learner's rank 0 that generators connect to. Null: that from which its node "
        "reaches Redis, wherever rank 0 is.",
    )
    staging: bool = Field(
        True,
        description="on: generators receive and load beside sampling, in memory for two more copies of the weights, "
        "and pause to change over; off: they pause for the whole transfer, with memory for a few buckets. nccl: "
        "always off.",
    )
    on_update: Literal["keep", "recompute"] = Field(
        "recompute", description="KV cache of requests in flight: keep the old one (fast) or re-prefill (exact)."
    )


class EvalConfig(Section):
    """Held-out evaluation."""

    prompts: PromptsConfig
    every: NonNegativeInt = Field(
        0, description="Policy versions between evaluations during training, by the same generators; 0: never."
    )
    limit: PositiveInt = Field(128, description="Prompts taken from the source, from its start.")
    samples: PositiveInt = Field(1, description="Responses per prompt.")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_response_tokens: PositiveInt | None = Field(None, description="Null: as in training.")
    seed: NonNegativeInt | None = Field(None, description="Seed of the sampling; null: run.seed.")


class Config(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    prompts: PromptsConfig
    reward: RewardConfig
    sampling: SamplingConfig = SamplingConfig()
    generator: GeneratorConfig = GeneratorConfig()
    broker: BrokerConfig = BrokerConfig()
    staleness: StalenessConfig = StalenessConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    metrics: MetricsConfig = MetricsConfig()
    page: PageConfig = PageConfig()
    tracking: TrackingConfig = TrackingConfig()
    tracing: TracingConfig = TracingConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    eval: EvalConfig | None = None

    @model_validator(mode="after")
    def _default_correction(self) -> Config:
        """With one update per batch prox is theta: `decoupled` clips nothing and collapsed in our measurement at any
        staleness (benchmarks/RESULTS.md), `bypass` clips the whole drift and did not."""
        correction = self.objective.correction
        if self.learner.updates_per_batch == 1 and not correction.model_fields_set:
            bypass = correction.model_copy(update={"mode": "bypass"})
            # The model is frozen for everybody else.
            object.__setattr__(self, "objective", self.objective.model_copy(update={"correction": bypass}))
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        sampling, learner, objective = self.sampling, self.learner, self.objective
        longest = sampling.max_prompt_tokens + sampling.max_response_tokens
        if learner.row_tokens < longest:
            raise ValueError(
                f"learner.micro_batch_tokens is {learner.micro_batch_tokens}, less than the longest possible sequence "
                f"({sampling.max_prompt_tokens} prompt + {sampling.max_response_tokens} response tokens); use at least "
                f"{-(-longest // learner.sequence_parallel)}"
            )
        if objective.overlong_cache_tokens > sampling.max_response_tokens:
            raise ValueError(
                f"objective.overlong_cache_tokens is {objective.overlong_cache_tokens}, more than "
                f"sampling.max_response_tokens ({sampling.max_response_tokens}); use at most that, or 0 for off"
            )
        if learner.groups_per_step % learner.updates_per_batch:
            raise ValueError(
                f"learner.groups_per_step is {learner.groups_per_step}, which learner.updates_per_batch "
                f"({learner.updates_per_batch}) does not divide; use a multiple of it"
            )
        if learner.tokens_per_step and (self.staleness.expired_tokens == "wait" or not self.staleness.max_staleness):
            raise ValueError(
                f"learner.tokens_per_step is {learner.tokens_per_step}, and what a full step leaves would be too old "
                f"for the next: staleness.expired_tokens is {self.staleness.expired_tokens!r}, staleness.max_staleness "
                f"{self.staleness.max_staleness}; use 'mask' or 'drop' and at least 1, or null"
            )
        correction = objective.correction
        if correction.mode == "bypass" and (correction.token_mask or correction.sequence_mask):
            raise ValueError(
                "objective.correction: token_mask and sequence_mask judge prox/mu, and with mode 'bypass' prox is mu; "
                "use mode 'decoupled' or 'none', or set both masks to null"
            )
        if sampling.dynamic_sampling and sampling.group_size < 2:
            raise ValueError(
                f"sampling.group_size is {sampling.group_size}: with sampling.dynamic_sampling a group of one is never "
                "mixed and nothing would train; use at least 2"
            )
        if self.reward.type == "reasoning_gym" and self.prompts.type != "reasoning_gym":
            raise ValueError(
                f"reward.type is 'reasoning_gym' but prompts.type is '{self.prompts.type}'; use prompts.type "
                "'reasoning_gym', or another reward"
            )
        return self

    @property
    def save_folders(self) -> tuple[Path, Path]:
        """Where checkpoints and where snapshots of the run lie."""
        snapshots, folder = self.learner.snapshot_folder, self.run.folder
        return folder / "checkpoints", folder / "snapshots" if snapshots is None else snapshots / self.run.run_id

    @property
    def max_outstanding(self) -> int:
        """Bound of the release budget, in groups (architecture, invariant 4)."""
        return (self.staleness.max_staleness + 1) * self.learner.groups_per_step
