"""What the configuration refuses, and what the derived numbers are."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from common.config import Config


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": "unit"},
        "model": {"path": "models/tiny"},
        "prompts": {"type": "dataset", "path": "train.jsonl"},
        "reward": {"type": "math_verify"},
    }
    return {**base, **sections}


def refuse(**sections: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(tree(**sections))
    return str(caught.value)


def test_config_minimal_has_working_defaults() -> None:
    config = Config.model_validate(tree())
    assert config.sampling.dynamic_sampling
    assert config.eval is None


@pytest.mark.parametrize(
    "correction, updates, mode",
    [
        (None, 1, "bypass"),
        (None, 4, "decoupled"),
        ({"mode": "decoupled"}, 1, "decoupled"),
        ({"cap": 3}, 1, "decoupled"),
    ],
)
def test_correction_left_out_depends_on_the_updates_per_batch(
    correction: dict[str, Any] | None, updates: int, mode: str
) -> None:
    objective = {} if correction is None else {"correction": correction}
    config = Config.model_validate(tree(objective=objective, learner={"updates_per_batch": updates}))
    assert config.objective.correction.mode == mode
    assert Config.model_validate(config.model_dump(mode="json")) == config, "a written configuration says the same"


SECTIONS = ["run", "model", "sampling", "generator", "broker", "staleness", "objective", "learner", "weights"]


@pytest.mark.parametrize("section", SECTIONS)
def test_config_unknown_key_in_any_section_refused(section: str) -> None:
    assert f"{section}.no_such_key" in refuse(**{section: {**tree().get(section, {}), "no_such_key": 1}})


@pytest.mark.parametrize("staleness, groups, expected", [(0, 8, 8), (2, 8, 24), (4, 3, 15)])
def test_max_outstanding_is_staleness_plus_one_times_groups(staleness: int, groups: int, expected: int) -> None:
    config = Config.model_validate(tree(staleness={"max_staleness": staleness}, learner={"groups_per_step": groups}))
    assert config.max_outstanding == expected


def test_token_budget_one_below_longest_sequence_refused_with_needed_value() -> None:
    sampling = {"max_prompt_tokens": 300, "max_response_tokens": 200}
    assert "at least 500" in refuse(sampling=sampling, learner={"micro_batch_tokens": 499}).replace("\n", " ")
    Config.model_validate(tree(sampling=sampling, learner={"micro_batch_tokens": 500}))


def test_overlong_cache_longer_than_response_refused() -> None:
    sampling, learner = {"max_response_tokens": 100}, {"micro_batch_tokens": 8192}
    message = refuse(sampling=sampling, learner=learner, objective={"overlong_cache_tokens": 101})
    assert "objective.overlong_cache_tokens is 101" in message
    Config.model_validate(tree(sampling=sampling, learner=learner, objective={"overlong_cache_tokens": 100}))


def test_updates_per_batch_not_dividing_groups_refused() -> None:
    message = refuse(learner={"groups_per_step": 8, "updates_per_batch": 3})
    assert "learner.updates_per_batch" in message
    Config.model_validate(tree(learner={"groups_per_step": 9, "updates_per_batch": 3}))


def test_group_of_one_refused_only_with_dynamic_sampling() -> None:
    assert "sampling.group_size is 1" in refuse(sampling={"group_size": 1})
    Config.model_validate(tree(sampling={"group_size": 1, "dynamic_sampling": False}))


def test_reasoning_gym_reward_on_dataset_prompts_refused() -> None:
    assert "reasoning_gym" in refuse(reward={"type": "reasoning_gym"})
    prompts = {"type": "reasoning_gym", "task": "chain_sum"}
    Config.model_validate(tree(prompts=prompts, reward={"type": "reasoning_gym"}))


@pytest.mark.parametrize(
    "url",
    ["redis://h:6379/0", "rediss://user@h/0", "unix:///run/valkey.sock", "rediss+sentinel://a:26379,[::1]:26379/run"],
)
def test_broker_url_without_password_accepted(url: str) -> None:
    assert Config.model_validate(tree(broker={"url": url})).broker.url == url


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@h/0", "redis://:s3cret@h/0", "http://h", "h:6379", "redis://h?password=s3cret",
        "redis+sentinel://h/run", "redis+sentinel://h:1",
    ],
)  # fmt: skip
def test_broker_url_with_password_or_wrong_scheme_refused(url: str) -> None:
    assert "broker.url" in refuse(broker={"url": url})


@pytest.mark.parametrize(
    "broker, message",
    [
        ({"url": "redis://h", "sentinel": {"hosts": ["h:1"], "service": "run"}}, "both set"),
        ({"url": "unix:///s", "cluster": True}, "cluster is true: use a redis://"),
        ({"sentinel": {"hosts": ["h:1"], "service": "run"}, "cluster": True}, "no sentinel"),
        ({"url": "redis://h", "tls": {}}, "use rediss://"),
        ({"url": "rediss://h", "tls": {"cert_file": "c.pem"}}, "key_file is not; set both"),
        ({"url": "redis://me@h", "user": "you"}, "use one of them"),
        ({"sentinel": {"hosts": ["h"], "service": "run"}}, "broker.sentinel.hosts"),
    ],
)
def test_broker_address_that_contradicts_itself_refused(broker: dict[str, Any], message: str) -> None:
    assert message in refuse(broker=broker)


@pytest.mark.parametrize(
    "section, value",
    [
        ("run", {"name": "Has Spaces"}),
        ("run", {"name": "ok", "id": "../escape"}),
        ("sampling", {"temperature": 0}),
        ("generator", {"gpu_memory_utilization": 1.5}),
        ("broker", {"port": 70000}),
        ("staleness", {"max_staleness": -1}),
        ("objective", {"dual_clip": 1.0}),
        ("objective", {"clip_low": float("nan")}),
        ("learner", {"zero_stage": 4}),
        ("reward", {"type": "function", "function": "no_colon"}),
        ("reward", {"type": "function", "function": "os.system('x'):f"}),
        ("prompts", {"type": "reasoning_gym", "path": "x"}),
    ],
)
def test_config_impossible_value_refused(section: str, value: dict[str, Any]) -> None:
    assert section in refuse(**{section: value})


def test_config_is_frozen() -> None:
    config = Config.model_validate(tree())
    with pytest.raises(ValidationError):
        config.learner.max_steps = 3  # type: ignore[misc]


def test_run_id_falls_back_to_name() -> None:
    assert Config.model_validate(tree()).run.run_id == "unit"
    config = Config.model_validate(tree(run={"name": "unit", "id": "unit-7", "dir": "out"}))
    assert (config.run.run_id, config.run.folder.as_posix()) == ("unit-7", "out/unit-7")


def test_config_json_dump_loads_to_an_equal_config() -> None:
    config = Config.model_validate(
        tree(
            objective={"correction": {"token_mask": [0.5, 2.0]}},
            eval={"prompts": {"type": "reasoning_gym", "task": "gcd"}},
            reward={"type": "function", "function": "examples.reward:score", "correct_at": 1.0},
        )
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_interpolated_proximal_only_with_decoupled_and_without_masks() -> None:
    for correction in ({"mode": "bypass"}, {"mode": "none"}, {"token_mask": [0.5, 2.0]}, {"sequence_mask": [0.5, 2.0]}):
        message = refuse(objective={"correction": {"proximal": "interpolated", **correction}})
        assert "objective.correction" in message and "use" in message and "'recomputed'" in message.replace("\n", "")
    Config.model_validate(tree(objective={"correction": {"proximal": "interpolated"}}))


def test_reference_that_nothing_reads_refused() -> None:
    assert "kl_coefficient is 0" in refuse(objective={"reference": "models/tiny"})
    Config.model_validate(tree(objective={"reference": "models/tiny", "kl_coefficient": 0.01}))


def test_gae_has_defaults_of_its_own_and_keeps_them_in_part() -> None:
    advantage = Config.model_validate(
        tree(objective={"advantage": {"type": "gae", "optimizer": {"warmup_steps": 3}}})
    ).objective.advantage
    assert advantage.type == "gae"
    assert (advantage.gamma, advantage.gae_lambda, advantage.value_clip, advantage.whiten) == (1.0, 0.95, 0.5, True)
    assert (advantage.optimizer.lr, advantage.optimizer.warmup_steps) == (1e-5, 3)
    assert "gamma" in refuse(objective={"advantage": {"type": "gae", "gamma": 1.5}})
