"""Every object of every combination is valid for every Kubernetes version the chart names, and none goes unchecked."""

from __future__ import annotations

import copy
from collections import Counter

import helm_python
import pytest

from k8s import chart
from tests.k8s import manifests
from tests.k8s.manifests import COMBINATIONS, VERSIONS, combination, of_kind


def test_there_are_twelve_combinations() -> None:
    assert len(COMBINATIONS) >= 12


def test_chart_lints(name: str) -> None:
    values = manifests.values_of(COMBINATIONS[name])
    report = helm_python.lint(chart.CHART, values, strict=True, kube_version=f"v{VERSIONS[-1]}.0")
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_and_was_checked(name: str, version: str) -> None:
    found = combination(name)
    checked = Counter(manifests.check(each, version) for each in found)
    assert checked.total() == len(found) > 10
    custom = [each for each in found if not each["apiVersion"].startswith(("v1", "apps", "policy", "networking"))]
    assert checked["custom"] == sum("k8s.io/v1" not in e["apiVersion"] or "x-k8s" in e["apiVersion"] for e in custom)


def test_every_kind_the_chart_can_render_is_rendered_by_some_combination() -> None:
    kinds = {each["kind"] for name in COMBINATIONS for each in combination(name)}
    assert kinds == {
        "ConfigMap", "Deployment", "LeaderWorkerSet", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget",
        "PodMonitor", "PrometheusRule", "ResourceClaimTemplate", "Role", "RoleBinding", "ScaledObject", "Service",
        "ServiceAccount", "StatefulSet",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, kind, path",
    [
        ("minimal", "Deployment", ("spec", "template", "spec", "tolerationz")),
        ("everything", "ScaledObject", ("spec", "fallback", "behaviour")),
        ("multi-host", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "nodeSelectors")),
        ("found-crds", "PodMonitor", ("spec", "podMetricsEndpoint")),
    ],
)
def test_misspelt_field_is_found(name: str, kind: str, path: tuple[str, ...]) -> None:
    broken = copy.deepcopy(of_kind(combination(name), kind)[0])
    node = broken
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = "x"
    with pytest.raises(AssertionError, match=path[-1]):
        manifests.check(broken, VERSIONS[-1])


def test_kind_without_a_schema_is_an_error() -> None:
    with pytest.raises(AssertionError, match="neither Kubernetes"):
        manifests.check({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}, VERSIONS[0])
