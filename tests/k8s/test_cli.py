"""`headrace k8s`: from a run's file to manifests."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from common.errors import ConfigError
from k8s import chart
from k8s.cli import app
from tests.k8s.manifests import COMBINATIONS, RUN, combination


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_render_prints_the_chart_with_the_run_as_it_is() -> None:
    values = str(COMBINATIONS["cpu"])
    output = run("render", str(RUN), "--name", "my-run", "-n", "rl", "-f", values)
    assert list(yaml.load_all(output, Loader=yaml.CSafeLoader)) == list(combination("cpu"))


def test_release_is_named_after_the_run_unless_told() -> None:
    found = list(yaml.load_all(run("render", str(RUN)), Loader=yaml.CSafeLoader))
    assert {"laptop", "laptop-learner", "laptop-run"} <= {each["metadata"]["name"] for each in found}


def test_values_only_are_what_helm_takes(tmp_path: Path) -> None:
    output = run("render", str(RUN), "--values-only", "-f", str(COMBINATIONS["external-tls"]))
    assert yaml.safe_load(output)["run"] == RUN.read_text()
    assert "run: |" in output  # readable, comments included
    rendered = chart.render(yaml.safe_load(output), "my-run", "rl")
    assert [yaml.safe_load(text) for text in rendered] == list(combination("external-tls"))


def test_later_values_file_wins_and_maps_are_merged(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{generator: {replicas: 3, shmSize: 1Gi}}")
    (tmp_path / "b.yaml").write_text("{generator: {replicas: 4}}")
    values, _ = chart.run_values(RUN, [tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert values["generator"] == {"replicas": 4, "shmSize": "1Gi"}


def test_mistake_in_the_run_is_found_before_rendering(tmp_path: Path) -> None:
    bad = tmp_path / "run.yaml"
    bad.write_text(RUN.read_text().replace("ranks: 2", "ranks: two"))
    with pytest.raises(ConfigError, match=r"learner\.ranks: .*integer"):
        chart.run_values(bad)
    (tmp_path / "values.yaml").write_text("{overrides: {learner.groups_per_step: 0}}")
    with pytest.raises(ConfigError, match=r"learner\.groups_per_step"):
        chart.run_values(RUN, [tmp_path / "values.yaml"])


def test_run_in_a_values_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("run: 'a: 1'")
    with pytest.raises(ConfigError, match="run: a values file holds one too"):
        chart.run_values(RUN, [tmp_path / "values.yaml"])


def test_missing_package_is_named_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "helm_python":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install helm-python-sdk.*or the tool helm"):
        chart.render({"run": RUN.read_text()}, "x", "rl")


def test_secret_has_another_password_for_every_role_and_every_time() -> None:
    first, second = (yaml.safe_load(run("secret", "my-run-redis")) for _ in range(2))
    passwords = [*first["stringData"].values(), *second["stringData"].values()]
    assert first["metadata"]["name"] == "my-run-redis"
    assert list(first["stringData"]) == ["broker", "generator", "learner", "reader", "operator", "admin"]
    assert len(set(passwords)) == 12
    assert min(map(len, passwords)) >= 43
