"""Prometheus' own promtool on the rules and on what is exposed. It is not installed with Headrace: Debian has it in the
package `prometheus`; HEADRACE_PROMTOOL may name it where it is not on the PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from common.families import families
from tests.alerts.cases import CASES, Case
from tests.alerts.rules import RULES, alerts, exported

PROMTOOL = os.environ.get("HEADRACE_PROMTOOL") or shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is neither on the PATH nor in HEADRACE_PROMTOOL (Debian: package prometheus)"
)
AT_MINUTE = 57
INSTANCE = "pod:9400"


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """What promtool prints. AssertionError: it finds fault."""
    done = subprocess.run([PROMTOOL or "", *map(str, arguments)], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def series(values: dict[str, str], run: str) -> list[dict[str, str]]:
    found = []
    for selector, samples in values.items():
        name, _, labels = selector.partition("{")
        inner = ", ".join(filter(None, [labels.rstrip("}"), f'run="{run}"', f'instance="{INSTANCE}"']))
        found.append({"series": f"{name}{{{inner}}}", "values": samples})
    return found


def expected(rule: dict[str, Any], case: Case) -> dict[str, Any]:
    """The alert of the run `bad`, with its texts as people read them."""
    own = ["run"] if "by (run)" in rule["expr"] else ["run", "instance"] if case.bad else []
    values = {"run": "bad", "instance": INSTANCE}
    labels = {**rule["labels"], **{label: values[label] for label in own}}
    render = lambda text: re.sub(r"\{\{ \$value[^}]*\}\}", case.value, re.sub(  # noqa: E731
        r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text))  # fmt: skip
    return {"exp_labels": labels, "exp_annotations": {k: render(text) for k, text in rule["annotations"].items()}}


@pytest.mark.parametrize("name", CASES)
def test_alert_fires_for_the_run_that_is_ill_and_for_no_other(name: str, tmp_path: Path) -> None:
    rule, case = alerts()[name], CASES[name]
    minutes, firing = (0, AT_MINUTE), expected(rule, case)
    ill = series(case.bad, "bad") + (series(case.good, "good") if case.bad else [])
    tests = [
        {
            "interval": "1m",
            "input_series": given,
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerting if minute else []}
                for minute in minutes
            ],
        }
        for given, alerting in ((ill, [firing]), (series(case.good, "good"), []))
    ]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def test_rule_file_is_clean() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES)


class _Everything(Collector):
    def collect(self) -> Iterator[Family]:
        metrics = exported().values()
        yield from families(metrics, {m.name: {"/".join(m.labels): 1.0} if m.labels else 1.0 for m in metrics}, "run")


def test_every_name_is_as_prometheus_wants_it() -> None:
    registry = CollectorRegistry()
    registry.register(_Everything())
    text = generate_latest(registry).decode()
    assert all(f"\n{name}{{" in text for name in exported())
    assert promtool("check", "metrics", text=text) == ""
