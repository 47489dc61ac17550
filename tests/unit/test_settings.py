"""Where a field's value comes from, and what a mistake reads like."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import settings
from common.errors import ConfigError

MINIMAL = """
run: {name: unit}
model: {path: models/tiny}
prompts: {type: dataset, path: train.jsonl}
reward: {type: math_verify}
learner: {max_steps: 5}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refuse(path: Path, *overrides: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settings.load(path, overrides, environ or {})
    return str(caught.value)


def test_load_file_only_takes_file_and_defaults(file: Path) -> None:
    config = settings.load(file, environ={})
    assert (config.learner.max_steps, config.learner.groups_per_step) == (5, 8)


def test_load_variable_wins_over_file_and_override_over_both(file: Path) -> None:
    environ = {"HEADRACE__LEARNER__MAX_STEPS": "6"}
    assert settings.load(file, environ=environ).learner.max_steps == 6
    assert settings.load(file, ["learner.max_steps=7"], environ).learner.max_steps == 7


def test_load_override_reaches_nested_section_that_file_leaves_out(file: Path) -> None:
    config = settings.load(file, ["objective.correction.mode=bypass", "objective.dual_clip=null"], {})
    assert config.objective.correction.mode == "bypass"
    assert config.objective.dual_clip is None


def test_load_override_value_with_equals_sign_kept_whole(file: Path) -> None:
    assert settings.load(file, ["prompts.suffix=a=b"], {}).prompts.suffix == "a=b"


OTHER_NAMES = ["HEADRACE_REDIS_URL", "HEADRACE_REDIS_PASSWORD", "HEADRACE_GENERATOR_ID", "headrace__run__name"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_load_variable_without_the_prefix_ignored(file: Path, name: str) -> None:
    assert settings.load(file, environ={name: "x"}).run.name == "unit"


def test_load_reads_process_environment_by_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE__RUN__SEED", "11")
    assert settings.load(file).run.seed == 11


def test_load_unknown_key_names_file_field_and_value(file: Path) -> None:
    message = refuse(file, "learner.stepps=3")
    assert message.startswith(f"{file}: learner.stepps: unknown key (value 3)")
    assert "\n" not in message


def test_load_several_mistakes_gives_one_line_each(file: Path) -> None:
    lines = refuse(file, "learner.stepps=3", "sampling.temperature=-1").splitlines()
    assert len(lines) == 2
    assert any("sampling.temperature" in line and "-1" in line for line in lines)


def test_load_union_mistake_does_not_show_the_discriminator(file: Path) -> None:
    message = refuse(file, "prompts.task=chain_sum")
    assert "prompts.task: unknown key" in message


def test_load_unknown_choice_lists_the_known_ones(file: Path) -> None:
    message = refuse(file, "reward.type=vibes")
    assert "vibes" in message and "math_dapo" in message and "\n" not in message


def test_load_field_named_like_a_choice_keeps_its_name(file: Path) -> None:
    file.write_text(MINIMAL.replace("{type: math_verify}", "{type: function, function: no_colon}"))
    assert "reward.function" in refuse(file)


def test_load_url_with_password_refused_without_repeating_it(file: Path) -> None:
    message = refuse(file, "broker.url=redis://user:s3cret@h/0")
    assert "broker.url" in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "text, expected",
    [
        ("run: [1", "not valid YAML"),
        ("- a\n- b", "holds a list"),
        ("", "holds a NoneType"),
        ("run: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_load_file_that_is_no_configuration_refused(file: Path, text: str, expected: str) -> None:
    file.write_text(text)
    message = refuse(file)
    assert message.startswith(str(file)) and expected in message and "\n" not in message


def test_load_missing_file_refused_in_one_line(tmp_path: Path) -> None:
    assert "no such file" in refuse(tmp_path / "absent.yaml")


def test_load_folder_and_binary_file_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refuse(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refuse(tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["learner.max_steps", "=3", ""])
def test_load_override_without_key_or_value_refused(file: Path, override: str) -> None:
    assert "expected section.field=value" in refuse(file, override)


def test_load_override_below_a_plain_value_refused(file: Path) -> None:
    assert "not a section" in refuse(file, "run.name.first=x")


def test_load_variable_with_bad_yaml_names_the_variable(file: Path) -> None:
    assert "HEADRACE__RUN__NAME" in refuse(file, environ={"HEADRACE__RUN__NAME": "[1"})


def test_load_overlay_lays_its_fields_over_and_keeps_the_others(file: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("objective: {clip_high: 0.2}\nlearner: {groups_per_step: 16}\n")
    config = settings.load(file, [str(overlay), "learner.groups_per_step=24"], {})
    assert (config.objective.clip_high, config.learner.max_steps) == (0.2, 5)
    assert config.learner.groups_per_step == 24, "a later override wins"


def test_load_overlay_of_another_type_replaces_the_section(file: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("prompts: {type: reasoning_gym, task: chain_sum}\n")
    assert settings.load(file, [str(overlay)], {}).prompts.type == "reasoning_gym"


def test_load_overlay_that_is_not_there_named(file: Path) -> None:
    assert "missing.yaml: no such file" in refuse(file, "missing.yaml")
