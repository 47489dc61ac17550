"""What generator and learner show: the families of the catalogue, and probes that follow what they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from broker import Member
from common import catalogue
from common.config import Config
from generator.exposed import Exposed as GeneratorExposed
from learner.exposed import PHASES
from learner.exposed import Exposed as LearnerExposed


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "shown", "dir": tmp_path},
            "model": {"path": "none"},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "staleness": {"max_staleness": 2},
        }
    )


def shown(collector: object) -> dict[str, float]:
    """`name{label}` -> value of everything a collector shows; each is of the run."""
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type]
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            assert sample.labels["run"] == "shown"
            found[sample.name + "".join(f"{{{v}}}" for k, v in sample.labels.items() if k != "run")] = sample.value
    return found


def test_generator_shows_its_member_and_is_ready_while_it_serves_an_accepted_version(config: Config) -> None:
    counters = {"tokens": 40.0, "requests": 2.0, "busy_s": 1.5, "in_flight": 1.0, "updates": 3.0}
    members = [Member("g1", "generator", "syncing", version=-1, counters=counters)]
    exposed = GeneratorExposed(config, lambda: members[-1], lambda: {"load": 0.5})
    assert exposed.health.live.reason == exposed.health.ready.reason == "loading"
    exposed.beat(learner_version=7)
    assert exposed.health.live.ok and exposed.health.ready.reason == "syncing"
    members.append(replace(members[-1], state="serving", version=5))
    assert exposed.health.ready.ok
    exposed.beat(learner_version=8)
    assert "version 5, the learner is at 8" in exposed.health.ready.reason
    members.append(replace(members[-1], state="draining"))
    assert exposed.health.ready.reason == "draining" and exposed.health.live.ok
    exposed.vllm = CollectorRegistry()
    exposed.vllm.register(exposed)  # as in the process: one registry, which must not collect us from within
    assert "headrace_generator_kv_cache_ratio" not in shown(exposed), "vLLM has not registered yet"
    for name, value in (("kv_cache_usage_perc", 0.25), ("num_requests_running", 3), ("num_requests_waiting", 1)):
        Gauge(f"vllm:{name}", "of vLLM", ["model_name", "engine"], registry=exposed.vllm).labels("m", "0").set(value)
    found = shown(exposed)
    assert found["headrace_generator_kv_cache_ratio"] == 0.25
    assert found["headrace_generator_sequences{running}"] == 3 and found["headrace_generator_sequences{waiting}"] == 1
    assert found["headrace_generator_state{draining}"] == 1 and found["headrace_generator_state{serving}"] == 0
    assert found["headrace_generator_tokens_total"] == 40 and found["headrace_generator_busy_seconds_total"] == 1.5
    exposed.failed["reward_timeout"] += 2
    assert shown(exposed)["headrace_generator_failures_total{reward_timeout}"] == 2
    assert found["headrace_generator_update_seconds{load}"] == 0.5 and found["headrace_generator_updates_total"] == 3
    assert {name.partition("{")[0] for name in found} == {metric.name for metric in catalogue.GENERATOR}


def test_generator_that_holds_prompts_and_brings_nothing_forth_is_stuck(config: Config) -> None:
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"stalled_s": 1e-9})})
    members = [Member("g1", "generator", "serving", version=5, counters={"in_flight": 1.0, "tokens": 3.0})]
    exposed = GeneratorExposed(config, lambda: members[-1], dict)
    exposed.beat(5)
    exposed.health._stalled_s = 60.0
    before = exposed.health._moved
    exposed.beat(5)
    assert exposed.health._moved == before, "a heartbeat alone is no progress"
    members.append(replace(members[-1], counters={"in_flight": 1.0, "tokens": 4.0}))
    exposed.beat(5)
    assert exposed.health._moved != before
    before = exposed.health._moved
    members.append(replace(members[-1], counters={"in_flight": 0.0, "tokens": 4.0}))
    exposed.beat(5)
    assert exposed.health._moved != before, "waiting for a prompt is not being stuck"


def test_learner_shows_its_phase_the_last_record_and_its_hunger(config: Config) -> None:
    exposed = LearnerExposed(config)
    assert not exposed.health.live.ok
    with exposed.phase("publishing"):
        assert shown(exposed)["headrace_learner_phase{publishing}"] == 1
    assert not exposed.health.ready.ok, "published, and not yet serving"
    exposed.serving()
    assert exposed.health.ready.ok and exposed.hunger()["steps"] == 0
    with exposed.phase("training"):
        busy = exposed.hunger()["step_s"]
        while exposed.hunger()["step_s"] <= busy:  # a step under way counts as it goes on
            pass
    starved = exposed.hunger()["starved_s"]
    while exposed.hunger()["starved_s"] <= starved:
        pass
    record = {"entropy": 0.5, "step_s": 2.0, "tokens_per_s": 9.0, "trained_tokens": 10.0, "staleness_0": 0.7,
              "staleness_2": 0.3, "learner_wait_share": 0.25}  # fmt: skip
    for step in (1, 2):
        exposed.write(step, record)
    found = shown(exposed)
    assert found["headrace_learner_entropy"] == 0.5 and found["headrace_learner_step_seconds"] == 2
    assert found["headrace_learner_tokens_per_second"] == 9 and found["headrace_learner_learner_wait_ratio"] == 0.25
    assert found["headrace_learner_trained_tokens_total{0}"] == 14
    assert found["headrace_learner_trained_tokens_total{2}"] == 6
    assert found["headrace_learner_steps_total"] == exposed.hunger()["steps"] == 2
    assert "headrace_learner_loss" not in found, "what is not known is missing"
    assert sum(found[f"headrace_learner_phase{{{phase}}}"] for phase in PHASES) == 1
