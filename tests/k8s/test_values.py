"""What the chart refuses, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import ConfigError
from k8s import chart
from tests.k8s.manifests import HERE, values_of

BAD = sorted((HERE / "bad").glob("*.yaml"))


def refusal(values: dict[str, Any], name: str = "my-run") -> str:
    with pytest.raises(ConfigError) as caught:
        chart.render(values, name, "rl")
    return str(caught.value)


def test_there_are_twenty_bad_files() -> None:
    assert len(BAD) >= 20


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_values_file_is_refused_by_the_schema_which_names_the_field(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expected: ")
    message = refusal(values_of(path))
    assert "don't meet the specifications of the schema" in message
    assert expected in message


@pytest.mark.parametrize(
    "values, expected",
    [
        ("externalRedis: {url: 'redis://x:6379'}", "valkey.enabled is true and externalRedis.url is set"),
        ("valkey: {enabled: false}", "valkey.enabled is false and externalRedis.url is empty"),
        (
            "{valkey: {enabled: false}, externalRedis: {url: 'redis://x:6379', tls: {secret: s}}}",
            'externalRedis.tls.secret is set and externalRedis.url is "redis://x:6379"; use rediss://',
        ),
        (
            "{valkey: {enabled: false}, externalRedis: {url: 'rediss://x:1', tls: {clientCertificate: true}}}",
            "externalRedis.tls.clientCertificate is true; name the Secret",
        ),
        (
            "{valkey: {enabled: false}, externalRedis: {url: 'redis+sentinel://x:1/m', cluster: true}}",
            "externalRedis.cluster is true and externalRedis.url names sentinels",
        ),
        (
            "{valkey: {enabled: false}, externalRedis: {url: 'redis+sentinel://x:1'}}",
            "expected redis+sentinel://host:port[,host:port...]/service",
        ),
        (
            "{valkey: {enabled: false}, externalRedis: {url: 'redis://x:1', user: me}}",
            "one user for all needs userPerRole=false",
        ),
        ("image: {tag: latest}", "image.tag is latest"),
        ("valkey: {image: {tag: latest}}", "valkey.image.tag is latest"),
        ("learner: {minNodes: 3}", "learner: minNodes 3, nodes 1, maxNodes 1"),
        ("{learner: {nodes: 2, maxNodes: 2}, runs: {accessMode: ReadWriteOnce}}", "nodes share the checkpoints"),
        ("autoscaling: {enabled: true, min: 5, max: 4}", "autoscaling.min is 5, more than autoscaling.max, 4"),
        ("kueue: {priorityClass: x}", "kueue.priorityClass is set and kueue.queue is empty"),
        ("{device: cpu, generator: {resourceClaim: {enabled: true}}}", "device is cpu and a resourceClaim is enabled"),
        ("run: 'a: ['", "run: not valid YAML"),
        ("run: 'a: 1'", 'run: section "run" is missing'),
    ],
)
def test_contradiction_is_refused_in_words(values: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    assert expected in refusal(values_of(file))


def test_contradictions_are_named_all_at_once(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("{image: {tag: latest}, kueue: {priorityClass: x}, autoscaling: {enabled: true, min: 9}}")
    assert refusal(values_of(file)).count("\n- ") == 3


def test_default_values_satisfy_the_schema_but_for_the_run() -> None:
    assert refusal({}).splitlines()[1:] == ["headrace:", "- at '/run': minLength: got 0, want 1"]


def test_every_value_has_a_place_in_the_schema() -> None:
    """A field of values.yaml that the schema lacks would be refused; one that only the schema has is undocumented."""
    schema = yaml.safe_load((chart.CHART / "values.schema.json").read_text())
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())

    def names(node: dict[str, Any], where: str) -> set[str]:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        found = {where}
        for key, below in node.get("properties", {}).items():
            found |= names(below, f"{where}.{key}")
        return found

    def fields(node: Any, where: str) -> set[str]:
        found = {where}
        if isinstance(node, dict):
            for key, below in node.items():
                found |= fields(below, f"{where}.{key}")
        return found

    documented = fields(values, "")
    missing = {each for each in names(schema, "") - documented if not each.startswith(".global")}
    assert {each for each in missing if not each.endswith((".requests", ".limits"))} == set()
