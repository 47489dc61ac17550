"""Every number a run reports, with its meaning: `docs/metrics.md` and the help texts of `/metrics` come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Keys of a record in metrics.jsonl, in the sections of docs/metrics.md. Keys of one line belong together; `<n>` stands
# for a number.
RECORD: dict[str, dict[tuple[str, ...], str]] = {
    "Does it learn?": {
        ("sampled_accuracy",): (
            "share of correct answers over everything sampled since the last record, filtered groups included"
        ),
        ("raw_accuracy",): "share of correct answers in the batch; dynamic sampling keeps it away from 0 and 1",
        ("reward_mean", "raw_reward_mean"): "mean reward of the batch, after and before overlong punishment",
        ("response_length_mean", "response_length_max"): "tokens per answer, end token included",
        ("truncated_share",): (
            "share of answers cut off at `max_response_tokens`; rising towards 1: answers have no room"
        ),
        ("entropy",): "mean entropy of the policy at the sampled positions; near 0: it has stopped exploring",
        ("probability",): "mean probability that the policy gives the sampled tokens",
        ("zero_advantage_share",): (
            "share of the batch's groups whose rewards are all equal: they teach nothing, and dynamic "
            "sampling drops them"
        ),
        ("generation_factor",): (
            "groups sampled for every group trained; above `sampling.max_generation_factor` the prompts are "
            "too easy or too hard, and the log says so"
        ),
        ("loss",): "the step's loss; its height means little, for advantages are centred",
        ("grad_norm",): "norm of the gradient before clipping",
        ("learning_rate",): "of this step",
        ("nonfinite",): (
            "updates (of policy and critic) left out since the last record because loss or gradient were not "
            "finite; other than 0: look for the group ids in the learner's log"
        ),
        ("kl_reference",): "k3 estimate of KL(theta ‖ reference); 0 without `objective.kl_coefficient`",
        ("value_loss", "value_grad_norm"): "with a critic: its loss, and the norm of its gradient before clipping",
        ("explained_variance",): (
            "share of the returns' variance that the values before the batch explain; 1: a perfect critic, 0 "
            "or below: no better than a constant"
        ),
        ("return_mean",): "mean of the returns that the critic is trained on",
    },
    "Is it off-policy, and how far?": {
        ("staleness_mean", "staleness_max"): "age of the trained tokens; the maximum never exceeds `max_staleness`",
        ("staleness_<n>",): "share of the trained tokens that are n versions old",
        ("weight_mean", "weight_p99", "weight_max"): (
            "the correction weight w after truncation; a mean near 1 is healthy"
        ),
        ("weight_at_cap",): "share of tokens whose weight is at the cap",
        ("importance_mean", "importance_max"): "prox/mu before truncation",
        ("effective_sample_size",): "(sum w)² / (n sum w²); 1: all tokens count alike; below 0.5: few carry the step",
        ("kl_k1", "kl_k3"): (
            "two estimates of KL(mu ‖ prox), of KL(mu ‖ theta) where prox is not computed; k1 may be "
            "negative, k3 may not and varies less"
        ),
        ("clip_above", "clip_below", "clip_dual"): (
            "share of tokens without gradient because the ratio left the clip range above, below, or met the "
            "dual clip"
        ),
        ("masked_share",): "share of the answers' tokens that do not count",
        ("probability_gap",): (
            "mean difference between the learner's and the sampler's probability of a token. Below 0.005 is "
            "healthy; above 0.01 the two do not compute the same thing: temperature, dtype, chat template, or"
            " a weight update that did not land"
        ),
    },
    "Does it flow?": {
        ("step", "version", "time_s"): (
            "optimizer steps, policy version it made, seconds of training, those before a resume included"
        ),
        ("ranks",): "of the learner, which share the step",
        ("groups", "responses", "tokens"): "in the batch; tokens are response tokens",
        ("trained_tokens",): "those of them that count in the loss",
        ("expired_tokens", "overlong_filtered_tokens"): (
            "masked because they are too old, or because of overlong filtering"
        ),
        ("updates",): "optimizer updates made with the batch",
        ("filtered_correct", "filtered_wrong", "filtered_equal"): (
            "groups that dynamic sampling dropped since the last record: all right, all wrong, all of one "
            "reward where correctness is unknown; many of the first: the data is too easy, of the second: too"
            " hard"
        ),
        ("expired",): "groups dropped because they were too old; their prompts are sampled again",
        ("dead",): (
            "prompts set aside after `max_attempts` failures; below 0 when more were put back with `headrace "
            "dead retry`"
        ),
        ("duplicates",): "late results of leases that had been taken over, discarded",
        ("outstanding",): "groups released and neither trained nor dropped",
        ("generators",): "living generators",
        ("learner_wait_share", "wait_s"): "time in which the learner waited for groups; high: add generators",
        ("generator_busy_share",): "share of the time in which generators sampled",
        ("generator_blocked_share",): (
            "share of the time in which generators waited for a prompt; high: the learner is the bottleneck"
        ),
        ("overlapped_groups",): "groups of the batch whose sampling ended while an optimizer step ran",
        ("tokens_per_s",): "trained tokens per second",
        ("sampled_tokens_per_s",): "sampled tokens per second, all generators together",
        ("padding_share",): (
            "share of the ranks' work that is waiting for the longest row of a lock-step; rows hold no padding"
        ),
        ("mfu",): (
            "model FLOPs utilisation of the optimizer updates (Chowdhery et al. 2022, appendix B), of the policy's "
            "forward and backward; missing where `learner.peak_tflops` is not known"
        ),
        ("step_s", "train_s", "publish_s"): (
            "duration of the whole step, of the optimizer updates in it, and of handing over the weights"
        ),
    },
}

# Keys of a record in eval.jsonl.
EVALUATION: dict[tuple[str, ...], str] = {
    ("accuracy",): (
        "share of correct answers, averaged over prompts; missing where the reward tells no answer right "
        "from wrong"
    ),
    ("standard_error",): "of the accuracy, over prompts; of the reward where there is no accuracy",
    ("reward_mean",): "mean reward of the scored answers, without overlong punishment",
    ("response_length_mean",): "tokens per answer, end token included",
    ("truncated_share",): "share of answers cut off at the token limit",
    ("oldest_version", "newest_version"): (
        "policy versions that sampled the answers; generators go on receiving weights meanwhile"
    ),
    ("prompts", "samples"): "prompts evaluated, answers to each",
    ("not_scored",): "answers on which the reward failed, or that could not be sampled; they count as not correct",
    ("seconds",): "from the beginning to the last answer",
}


@dataclass(frozen=True)
class Metric:
    """A family of `/metrics`. The values of every label come from a fixed set, so that series cannot multiply."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


# Of the whole run, read from Redis at every scrape; served by the broker service.
RUN: tuple[Metric, ...] = (
    _gauge("headrace_policy_version", "policy version of the learner"),
    _counter("headrace_prompts_released_total", "releases of prompts; first term of the conservation equation"),
    _counter("headrace_prompts_rereleased_total", "releases of prompts that had expired before, part of the former"),
    _counter("headrace_groups_submitted_total", "groups that reached the learner's stream"),
    _counter("headrace_groups_filtered_total", "groups that dynamic sampling dropped, by what all answers are", "kind"),
    _counter("headrace_groups_trained_total", "groups in an optimizer step"),
    _counter("headrace_groups_settled_total", "trained groups that a durable copy of the weights contains"),
    _counter("headrace_groups_expired_total", "groups that got too old as a whole; their prompts are sampled again"),
    _gauge("headrace_groups_dead", "prompts and groups that were given up, less those that were put back"),
    _gauge("headrace_dead_letters", "what is kept of those, and of entries that no release produced"),
    _counter("headrace_late_results_total", "results of leases that had been taken over, discarded"),
    _gauge("headrace_conservation_error", "released less everything accounted for; other than 0 is a bug"),
    _gauge("headrace_groups_outstanding", "released groups that have not ended, by where they are", "state"),
    _gauge("headrace_groups_unsettled", "trained groups that no durable copy of the weights contains yet"),
    _gauge("headrace_outstanding_limit", "the release budget: groups that may be outstanding"),
    _gauge("headrace_staleness_limit", "staleness.max_staleness, in versions"),
    _gauge("headrace_lag_groups", "groups that wait for the learner"),
    _gauge("headrace_lag_steps", "the same in optimizer steps"),
    _gauge("headrace_oldest_group_age_seconds", "since the release of the oldest group that has not ended"),
    _gauge("headrace_queue_bytes", "bytes of the groups that wait or are not settled, as the server samples them"),
    _gauge("headrace_redis_memory_bytes", "memory the server uses"),
    _gauge("headrace_redis_memory_limit_bytes", "the server's maxmemory; 0: none"),
    _gauge("headrace_members", "living processes", "role", "state"),
    _gauge("headrace_generators_behind", "serving generators whose weights are older than the learner's version"),
    _gauge("headrace_generators_desired", "generators the learner needs, from `autoscale.min` to `max`"),
    _gauge("headrace_scrape_errors", "1 if the server could not be read for this scrape"),
)

# Of one generator.
GENERATOR: tuple[Metric, ...] = (
    _gauge("headrace_generator_state", "1 for the state this generator is in", "state"),
    _gauge("headrace_generator_version", "policy version it samples with; -1 before the first"),
    _gauge("headrace_generator_weight_epoch", "epoch of the weight group it belongs to"),
    _gauge("headrace_generator_prompts_in_flight", "prompts it holds leases of"),
    _gauge("headrace_generator_update_seconds", "duration of the parts of its last weight update", "part"),
    _gauge("headrace_generator_kv_cache_ratio", "share of vLLM's KV cache in use"),
    _gauge("headrace_generator_sequences", "responses that vLLM samples, or holds back for want of room", "state"),
    _counter("headrace_generator_updates_total", "weight updates it has loaded"),
    _counter("headrace_generator_tokens_total", "tokens it has sampled"),
    _counter("headrace_generator_requests_total", "prompts it has sampled"),
    _counter("headrace_generator_groups_total", "groups it has submitted"),
    _counter("headrace_generator_filtered_total", "groups it has reported as uninformative"),
    _counter("headrace_generator_failures_total", "prompts that failed here, by what went wrong", "kind"),
    _counter("headrace_generator_duplicates_total", "results it sent too late"),
    _counter("headrace_generator_busy_seconds_total", "time in which a request ran"),
    _counter("headrace_generator_paused_seconds_total", "time in which sampling was paused for weights"),
    _counter("headrace_generator_blocked_seconds_total", "time in which it waited for prompts"),
    _counter("headrace_generator_broker_full_seconds_total", "time in which the broker had no room for its results"),
)

# Of the learner, beside the keys of `RECORD`, which become `headrace_learner_<key>` (see `family`).
LEARNER: tuple[Metric, ...] = (
    _gauge("headrace_learner_phase", "1 for what the learner does now", "phase"),
    _counter("headrace_learner_steps_total", "policy versions made by this process"),
    _counter("headrace_learner_trained_tokens_total", "tokens this process trained, by age in versions", "staleness"),
    _gauge("headrace_weights_seconds", "duration of the parts of the last publish", "part"),
    _gauge("headrace_weights_members", "generators that acknowledged the last published version"),
    _gauge("headrace_weights_dropped", "generators left out of the last publish because they died or did not answer"),
    _gauge("headrace_weights_bytes", "size of the weights on the wire"),
    _gauge("headrace_checkpoint_age_seconds", "since the last durable checkpoint or snapshot, or since the start"),
)

_UNITS = (("_per_s", "_per_second"), ("_s", "_seconds"), ("_share", "_ratio"))


def family(key: str) -> str:
    """Name in `/metrics` of a key of `RECORD`: with Prometheus' units."""
    for ending, unit in _UNITS:
        if key.endswith(ending):
            return f"headrace_learner_{key.removesuffix(ending)}{unit}"
    return f"headrace_learner_{key}"


def explained() -> dict[str, str]:
    """Key of `RECORD` -> its meaning, but for the keys that hold a number, and the step, which is the version."""
    rows = [row for section in RECORD.values() for row in section.items()]
    return {key: text for keys, text in rows for key in keys if "<" not in key and key != "step"}
