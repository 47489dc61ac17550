"""The Kustomize base is the chart with its default values; what is generated is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import settings
from k8s import chart, generate
from tests.k8s.manifests import Manifest, parse

KUBECTL = Path(sys.executable).with_name("kubectl")
# Pods learn of a changed file by Helm's checksum on them, or by Kustomize's hash in its name.
_HASH = re.compile(r"^headrace-run-[a-z0-9]{10}$")


def comparable(node: Any) -> Any:
    """`node` without what is Helm's or Kustomize's own: who manages it, and how pods learn of a changed file."""
    if isinstance(node, list):
        return [comparable(each) for each in node]
    if not isinstance(node, dict):
        return "headrace-run" if isinstance(node, str) and _HASH.match(node) else node
    own = ("helm.sh/chart", "app.kubernetes.io/managed-by", "checksum/run")
    result = {key: comparable(value) for key, value in node.items() if key not in own}
    return {key: value for key, value in result.items() if not (key == "annotations" and value == {})}


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    found = {(each["kind"], comparable(each["metadata"]["name"])): comparable(each) for each in manifests}
    assert len(found) == len(manifests)
    return found


def test_base_equals_the_chart(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(generate.BASE)
    (tmp_path / "kustomization.yaml").write_text("namespace: rl\nresources: [base]\n")
    command = [str(KUBECTL), "kustomize", "--load-restrictor=LoadRestrictionsNone", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    values, _ = chart.run_values(generate.BASE / "run.yaml")
    rendered = [parse(text) for text in chart.render(values, generate.NAME, "rl")]
    base, ours = by_name(list(yaml.load_all(result.stdout, Loader=yaml.CSafeLoader))), by_name(rendered)
    assert base.keys() == ours.keys()
    for key, manifest in ours.items():
        assert base[key] == manifest, key


@pytest.mark.parametrize("path", sorted(generate.files()), ids=lambda path: path.name)
def test_generated_file_is_current(path: Path) -> None:
    assert path.read_text() == generate.files()[path], "out of date; run `python -m k8s.generate`"


def test_kustomization_names_every_file_of_the_base() -> None:
    listed = yaml.safe_load((generate.BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(name for name, _ in generate.base())


def test_run_of_the_base_is_a_valid_configuration() -> None:
    assert settings.load(generate.BASE / "run.yaml", environ={}).run.run_id == generate.NAME
