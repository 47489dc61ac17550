"""Rendered combinations of the chart's options, and strict checks of them without a cluster.

`check` looks at every document and returns how it was checked; a kind that nothing can check is an error, so that no
object goes unchecked in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils as kubernetes

from k8s import chart

HERE = Path(__file__).parent
RUN = HERE / "run.yaml"
# The oldest version the chart says it takes, one between, and the newest that there are schemas of.
VERSIONS = ("1.34", "1.36", "1.37")
COMBINATIONS = {path.stem: path for path in sorted((HERE / "values").glob("*.yaml"))}

Manifest = dict[str, Any]

# The validator reads two megabytes of definitions for every document it is given.
kubernetes.schema_contents = lru_cache(maxsize=None)(kubernetes.schema_contents)


def parse(text: str) -> Manifest:
    manifest: Manifest = yaml.load(text, Loader=yaml.CSafeLoader)
    return manifest


def values_of(path: Path) -> dict[str, Any]:
    return {"run": RUN.read_text(), **(yaml.safe_load(path.read_text()) or {})}


@lru_cache
def combination(name: str) -> tuple[Manifest, ...]:
    """The manifests of values/<name>.yaml, as release my-run in namespace rl."""
    return tuple(parse(text) for text in chart.render(values_of(COMBINATIONS[name]), "my-run", "rl"))


def check(manifest: Manifest, version: str) -> str:
    """`kubernetes` or `custom`: against what the manifest was seen to be valid. AssertionError: it is not, or nobody
    can tell."""
    try:
        kubernetes.validate(manifest, version, strict=True)
        return "kubernetes"
    except kubernetes.SchemaNotFoundError:
        pass
    except kubernetes.ValidationError as error:
        raise AssertionError(f"{title(manifest)}: {'.'.join(map(str, error.path))}: {error.message:.300}") from None
    schema = _custom_schemas().get((manifest["apiVersion"], manifest["kind"]))
    assert schema is not None, f"{title(manifest)}: neither Kubernetes {version} nor tests/k8s/crds has its schema"
    found = [f"{'.'.join(map(str, e.path))}: {e.message:.300}" for e in schema.iter_errors(manifest)]
    assert not found, f"{title(manifest)}: {found}"
    for template in pod_templates(manifest):
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}, version)
    return "custom"


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def pod_templates(manifest: Manifest) -> list[Manifest]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]] if manifest["kind"] in ("Deployment", "StatefulSet") else []


def of_kind(manifests: tuple[Manifest, ...], kind: str, ending: str = "") -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]


@lru_cache
def _custom_schemas() -> dict[tuple[str, str], Any]:
    found = {}
    for path in (HERE / "crds").glob("*.json"):
        definition = json.loads(path.read_text())
        for version, schema in definition["versions"].items():
            closed = _closed(schema)
            closed["properties"]["metadata"] = {"type": "object", "required": ["name"]}
            key = f"{definition['group']}/{version}", definition["kind"]
            found[key] = jsonschema.Draft202012Validator(closed)
    return found


def _closed(schema: Any) -> Any:
    """A CRD's schema as JSON schema that refuses fields it does not name, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: _closed(value) for key, value in schema.items() if key not in ("format", "nullable", "properties")}
    if "properties" in schema:
        result["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    if schema.get("nullable") and "type" in schema:
        result["type"] = [schema["type"], "null"]
    return result


def containers(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """(workload, pod template, container) of everything that runs."""
    for manifest in manifests:
        for template in pod_templates(manifest):
            for container in template["spec"]["containers"]:
                yield manifest, template, container
