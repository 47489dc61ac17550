"""The Helm chart as an object: rendering it needs no cluster and no helm binary, only the package helm-python-sdk.

The package is optional: without it `render` says what to install, and `run_values` makes what `helm` itself takes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from common import settings
from common.config import Config
from common.errors import ConfigError

CHART = Path(__file__).with_name("headrace")
PASSWORDS = ("broker", "generator", "learner", "reader", "operator", "admin")
_ORDER = ("ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Role", "RoleBinding", "Service")
_KIND = re.compile(r"^kind: (\w+)$", re.MULTILINE)


def run_values(run: Path, files: Sequence[Path] = ()) -> tuple[dict[str, Any], Config]:
    """Values of the chart for a run, and the run's configuration as the cluster will see it.

    Args:
        run: the run's YAML file, which goes into the values as it is.
        files: values files of the chart, later ones win.

    Raises:
        ConfigError: a file cannot be read, or the run could not start with these `overrides`.
    """
    values: dict[str, Any] = {}
    for path in files:
        values = _over(values, settings.read(path))
    if "run" in values:
        raise ConfigError(f"run: a values file holds one too; leave it out, {run} is the run")
    overrides = values.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"overrides: expected dotted fields with their values (value {overrides!r:.60})")
    given = [f"{field}={yaml.safe_dump(value, default_flow_style=True)}" for field, value in overrides.items()]
    config = settings.load(run, given, environ={})
    return {**values, "run": run.read_text(encoding="utf-8")}, config


def render(values: Mapping[str, Any], name: str, namespace: str, chart: Path = CHART) -> list[str]:
    """Manifests as YAML texts, those that others need first.

    Raises:
        ConfigError: helm-python-sdk is not installed, or the chart refuses the values; one line per mistake.
    """
    try:
        from helm_python import Chart, HelmError
    except ImportError:
        raise ConfigError(
            "rendering needs the package helm-python-sdk (pip install helm-python-sdk==0.2.2), or the tool helm: "
            "headrace k8s render --values-only CONFIG > values.yaml; helm template NAME k8s/headrace -f values.yaml"
        ) from None
    try:
        with Chart.load(chart) as loaded:
            files = loaded.render(dict(values), name=name, namespace=namespace)
    except HelmError as error:
        raise ConfigError("\n".join(line for line in str(error).splitlines() if line.strip())) from None
    texts = [
        document.strip("\n") + "\n"
        for path, content in sorted(files.items())
        if path.endswith(".yaml")
        for document in ("\n" + content).split("\n---\n")
        if _KIND.search(document)
    ]
    return sorted(texts, key=_place)


def secret(name: str, namespace: str | None = None) -> str:
    """Manifest of a Secret with a new random password for each role of Redis."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
            "type": "Opaque",
            "stringData": {role: secrets.token_urlsafe(32) for role in PASSWORDS},
        },
        sort_keys=False,
    )


def _place(document: str) -> int:
    found = _KIND.search(document)
    return _ORDER.index(found[1]) if found and found[1] in _ORDER else len(_ORDER)


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` laid over it, as Helm does it: maps are merged, lists replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
