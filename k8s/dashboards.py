"""Grafana's dashboards, from a line per curve: `python -m k8s.generate` writes them to `headrace/files/dashboards`.

A query's braces stand for the selector of the run: `{}` for `{run="$run"}`, `{a="b"}` for `{run="$run", a="b"}`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 8, 7  # of Grafana's 24 columns, and in its rows


@dataclass(frozen=True)
class Panel:
    """`unit` is Grafana's name of one; `curves`: legend -> query; `{{label}}` in a legend is the series' label."""

    title: str
    unit: str
    curves: dict[str, str]

    def queries(self) -> dict[str, str]:
        return {legend: _of_run(query) for legend, query in self.curves.items()}


def _of_run(query: str) -> str:
    """The query for the run that is chosen on the dashboard."""
    return re.sub(r"\{([^}]*)\}", lambda found: '{run="$run"' + (f", {found[1]}" if found[1] else "") + "}", query)


def _record(keys: dict[str, str]) -> dict[str, str]:
    """Numbers of the learner's last step: legend -> what follows headrace_learner_."""
    return {legend: f"max(headrace_learner_{name}{{}})" for legend, name in keys.items()}


FLEET: dict[str, list[Panel]] = {
    "Flow": [
        Panel("Groups per minute", "short", {
            "released": "60 * sum(rate(headrace_prompts_released_total{}[$__rate_interval]))",
            "submitted": "60 * sum(rate(headrace_groups_submitted_total{}[$__rate_interval]))",
            "filtered, {{kind}}": "60 * sum by (kind) (rate(headrace_groups_filtered_total{}[$__rate_interval]))",
            "trained": "60 * sum(rate(headrace_groups_trained_total{}[$__rate_interval]))",
            "expired": "60 * sum(rate(headrace_groups_expired_total{}[$__rate_interval]))",
        }),
        Panel("Where outstanding groups are", "short", {
            "{{state}}": "max by (state) (headrace_groups_outstanding{})",
            "budget": "max(headrace_outstanding_limit{})",
            "trained, not settled": "max(headrace_groups_unsettled{})",
        }),
        Panel("Lag", "short", {"steps that wait for the learner": "max(headrace_lag_steps{})"}),
        Panel("Oldest group", "s", {"since its release": "max(headrace_oldest_group_age_seconds{})"}),
        Panel("Given up", "short", {
            "dead": "max(headrace_groups_dead{})",
            "dead letters": "max(headrace_dead_letters{})",
            "late results": "max(increase(headrace_late_results_total{}[1h]))",
            "conservation error": "max(headrace_conservation_error{})",
        }),
        Panel("Server's memory", "bytes", {
            "used": "max(headrace_redis_memory_bytes{})",
            "maxmemory": "max(headrace_redis_memory_limit_bytes{})",
            "groups": "max(headrace_queue_bytes{})",
        }),
    ],
    "Generators": [
        Panel("Members", "short", {
            "{{role}}, {{state}}": "max by (role, state) (headrace_members{})",
            "generators wanted": "max(headrace_generators_desired{})",
            "behind": "max(headrace_generators_behind{})",
        }),
        Panel("Versions", "short", {
            "{{instance}}": "headrace_generator_version{}",
            "learner": "max(headrace_policy_version{})",
        }),
        Panel("Tokens sampled", "short", {
            "{{instance}}": "rate(headrace_generator_tokens_total{}[$__rate_interval])",
            "all": "sum(rate(headrace_generator_tokens_total{}[$__rate_interval]))",
        }),
        Panel("A generator's time", "percentunit", {
            "busy": "avg(rate(headrace_generator_busy_seconds_total{}[$__rate_interval]))",
            "paused for weights": "avg(rate(headrace_generator_paused_seconds_total{}[$__rate_interval]))",
            "waiting for prompts": "avg(rate(headrace_generator_blocked_seconds_total{}[$__rate_interval]))",
            "server full": "avg(rate(headrace_generator_broker_full_seconds_total{}[$__rate_interval]))",
        }),
        Panel("KV cache in use", "percentunit", {"{{instance}}": "headrace_generator_kv_cache_ratio{}"}),
        Panel("Responses in vLLM", "short", {
            "{{state}}": "sum by (state) (headrace_generator_sequences{})",
            "prompts in flight": "sum(headrace_generator_prompts_in_flight{})",
        }),
        Panel("Prompts per minute, by end", "short", {
            "group": "60 * sum(rate(headrace_generator_groups_total{}[$__rate_interval]))",
            "filtered": "60 * sum(rate(headrace_generator_filtered_total{}[$__rate_interval]))",
            "failed, {{kind}}": "60 * sum by (kind) (rate(headrace_generator_failures_total{}[$__rate_interval]))",
            "too late": "60 * sum(rate(headrace_generator_duplicates_total{}[$__rate_interval]))",
        }),
        Panel("Stall for an update", "s", {"{{part}}": "max by (part) (headrace_generator_update_seconds{})"}),
        Panel("Weight groups formed", "short", {
            "an hour": "max(changes(headrace_generator_weight_epoch{}[1h]))",
        }),
    ],
    "Learner": [
        Panel("What it does", "percentunit", {
            "{{phase}}": "max by (phase) (avg_over_time(headrace_learner_phase{}[$__rate_interval]))",
        }),
        Panel("A step", "s", _record({
            "whole": "step_seconds", "waiting": "wait_seconds", "training": "train_seconds",
            "handing over": "publish_seconds",
        })),
        Panel("Tokens trained", "short", {
            "per second": "max(headrace_learner_tokens_per_second{})",
            "{{staleness}} versions old":
                "sum by (staleness) (rate(headrace_learner_trained_tokens_total{}[$__rate_interval]))",
        }),
        Panel("Use of the devices", "percentunit", _record({"mfu": "mfu", "waiting in lock-steps": "padding_ratio"})),
        Panel("Weights", "s", {"{{part}}": "max by (part) (headrace_weights_seconds{})"}),
        Panel("Delivered to", "short", {
            "generators": "max(headrace_weights_members{})",
            "left out": "max(headrace_weights_dropped{})",
        }),
        Panel("Since the last checkpoint or snapshot", "s", {"seconds": "min(headrace_checkpoint_age_seconds{})"}),
    ],
}  # fmt: skip

TRAINING: dict[str, list[Panel]] = {
    "Does it learn?": [
        Panel("Accuracy", "percentunit", _record({"all sampled": "sampled_accuracy", "batch": "raw_accuracy"})),
        Panel("Reward", "short", _record({"mean": "reward_mean", "before punishment": "raw_reward_mean"})),
        Panel("Length of answers", "short", _record({
            "mean": "response_length_mean", "longest": "response_length_max",
        })),
        Panel("Entropy", "short", _record({"nats a token": "entropy"})),
        Panel("Probability of a sampled token", "percentunit", _record({"mean": "probability"})),
        Panel("Answers and groups that teach less", "percentunit", _record({
            "truncated": "truncated_ratio", "zero advantage": "zero_advantage_ratio",
        })),
        Panel("Gradient norm", "short", _record({"before clipping": "grad_norm"})),
        Panel("Loss", "short", _record({"of the step": "loss", "updates left out": "nonfinite"})),
        Panel("Learning rate", "short", _record({"of the step": "learning_rate"})),
    ],
    "Is it off-policy, and how far?": [
        Panel("Staleness", "short", {
            **_record({"mean": "staleness_mean", "oldest": "staleness_max"}),
            "bound": "max(headrace_staleness_limit{})",
        }),
        Panel("Correction weight", "short", _record({"mean": "weight_mean", "99th percentile": "weight_p99"})),
        Panel("Effective sample size", "percentunit", _record({
            "of the tokens": "effective_sample_size", "weight at the cap": "weight_at_cap",
        })),
        Panel("Clipped", "percentunit", _record({"above": "clip_above", "below": "clip_below", "dual": "clip_dual"})),
        Panel("KL of sampler and learner", "short", _record({"k1": "kl_k1", "k3": "kl_k3"})),
        Panel("Difference in probability", "short", _record({"healthy below 0.005": "probability_gap"})),
    ],
    "How much?": [
        Panel("Version", "short", {"of the policy": "max(headrace_policy_version{})"}),
        Panel("In a batch", "short", _record({"groups": "groups", "responses": "responses"})),
        Panel("Tokens of a batch", "short", _record({
            "sampled": "tokens", "trained": "trained_tokens", "expired": "expired_tokens",
        })),
        Panel("Groups sampled for one trained", "short", _record({"groups": "generation_factor"})),
        Panel("Tokens per second", "short", _record({
            "trained": "tokens_per_second", "sampled": "sampled_tokens_per_second",
        })),
        Panel("Share of the time", "percentunit", _record({
            "learner waits": "learner_wait_ratio", "generators busy": "generator_busy_ratio",
            "generators wait": "generator_blocked_ratio",
        })),
    ],
}  # fmt: skip

BOARDS = {"fleet": FLEET, "training": TRAINING}


def board(name: str) -> str:
    """A dashboard as Grafana imports it: rows of panels, for one run of one Prometheus."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in BOARDS[name].items():
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        top += 1
        for index, panel in enumerate(members):
            across, down = index % (24 // _WIDTH), index // (24 // _WIDTH)
            place = {"x": across * _WIDTH, "y": top + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(panel, place))
        top += -(-len(members) // (24 // _WIDTH)) * _HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    run = {"name": "run", "label": "Run", "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 2,
           "query": "label_values(headrace_policy_version, run)"}  # fmt: skip
    tree = {
        "title": f"Headrace {name}",
        "uid": f"headrace-{name}",
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}, run]
        },
        "panels": panels,
    }
    return json.dumps(tree, indent=1) + "\n"


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries().items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"spanNulls": True}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }
