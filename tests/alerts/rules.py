"""What the alerts and dashboards of the chart say, and what they may speak of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from common import catalogue

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "k8s" / "headrace" / "files" / "alerts.yaml"

_NAME = re.compile(r"\b(?:headrace_\w+|vllm:\w+)")
# Of Prometheus itself, on every series.
_TARGET = {"run", "instance", "job", "pod"}


def alerts() -> dict[str, dict[str, Any]]:
    """Name -> rule, in the file's order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return {rule["alert"]: rule for rule in rules}


def exported() -> dict[str, catalogue.Metric]:
    """Every sample name that a process of a run serves of its own -> its family."""
    known = {metric.name: metric for metric in (*catalogue.RUN, *catalogue.GENERATOR, *catalogue.LEARNER)}
    for key, text in catalogue.explained().items():
        known[catalogue.family(key)] = catalogue.Metric(catalogue.family(key), "gauge", text)
    return known


def problems(query: str) -> Iterator[str]:
    """What in a PromQL query no process serves, or is no use of it."""
    known = exported()
    names = _NAME.findall(query)
    if not names:
        yield f"no metric in {query}"
    for name in names:
        if name not in known:
            yield f"{name} is not in common/catalogue.py"
    for name, selector in re.findall(r"\b(headrace_\w+)\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*[=!]", re.sub(r'"[^"]*"', "", selector)):
            if name in known and label not in {*known[name].labels, *_TARGET}:
                yield f"{name} has no label {label}"
    for function, name in re.findall(r"\b(rate|irate|increase|delta|deriv)\(\s*(headrace_\w+)", query):
        kind = "counter" if function in ("rate", "irate", "increase") else "gauge"
        if name in known and known[name].kind != kind:
            yield f"{function} of {name}, a {known[name].kind}"
    bare = set(names) & {name for name, metric in known.items() if metric.kind == "counter"}
    for name in bare:
        if not re.search(rf"\b(?:rate|irate|increase|resets)\(\s*{name}\b", query):
            yield f"{name} is a counter without rate or increase"
