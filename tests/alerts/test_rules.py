"""Alerts speak of what is exposed, and each has a run book and a test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from common.cli import app
from common.config import Config
from k8s import dashboards
from tests.alerts.cases import CASES
from tests.alerts.rules import ROOT, RULES, alerts, exported, problems

RUNBOOKS = ROOT / "docs" / "runbooks.md"


@pytest.mark.parametrize("name", alerts())
def test_alert_asks_for_what_is_exposed_and_says_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert list(problems(rule["expr"])) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    assert re.search(rf"^## {name}$", RUNBOOKS.read_text(), re.MULTILINE), f"no section on {name}"


def test_every_alert_is_tested_and_every_run_book_is_of_an_alert() -> None:
    assert set(CASES) == set(alerts())
    assert set(re.findall(r"^## (Headrace\w+)$", RUNBOOKS.read_text(), re.MULTILINE)) == set(alerts())


@pytest.mark.parametrize("board", dashboards.BOARDS)
def test_panels_ask_for_what_is_exposed_in_the_chosen_run(board: str) -> None:
    tree = json.loads(dashboards.board(board))
    assert [each["name"] for each in tree["templating"]["list"]] == ["datasource", "run"]
    queries = [target["expr"] for panel in tree["panels"] for target in panel.get("targets", [])]
    assert queries
    for query in queries:
        assert list(problems(query)) == [], query
        assert len(re.findall(r"\bheadrace_\w+", query)) == query.count('{run="$run"'), query


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("headrace_policy_versions{}", "headrace_policy_versions is not in common/catalogue.py"),
        ('headrace_members{stat="serving"}', "headrace_members has no label stat"),
        ("rate(headrace_policy_version[5m])", "rate of headrace_policy_version, a gauge"),
        ("headrace_groups_trained_total > 5", "headrace_groups_trained_total is a counter without rate or increase"),
        ("headrace_groups_trained", "headrace_groups_trained is not in common/catalogue.py"),
    ],
)
def test_query_of_something_else_is_found(query: str, problem: str) -> None:
    assert list(problems(query)) == [problem]


def test_every_selector_can_be_narrowed_to_a_run() -> None:
    """The chart puts its own run's id there."""
    text = RULES.read_text()
    assert re.findall(r"\bheadrace_\w+(?!\w)(?!\{run=~\"\.\+\")", re.sub(r"docs/\S+", "", text)) == []


def _fields(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Every field of the configuration, as `section.field`, whatever type its section is of."""
    yield path
    for option in [node, *node.get("anyOf", []), *node.get("oneOf", [])]:
        inner = schema["$defs"][option["$ref"].rsplit("/", 1)[-1]] if "$ref" in option else option
        for name, field in inner.get("properties", {}).items():
            yield from _fields(schema, field, f"{path}.{name}".lstrip("."))


def test_run_books_name_metrics_fields_and_commands_that_exist() -> None:
    text = RUNBOOKS.read_text()
    known = exported()
    assert {name for name in re.findall(r"\bheadrace_\w+", text) if name not in known} == set()
    schema = Config.model_json_schema()
    fields, sections = set(_fields(schema, schema)), set(schema["properties"])
    named = {name for name in re.findall(r"`([a-z]+\.[a-z_.]+)(?::[^`]*)?`", text) if name.split(".")[0] in sections}
    assert named and named - fields == set()
    group = typer.main.get_command(app)
    for name, second in re.findall(r"(?:^ {4}|`)headrace ([a-z0-9]+)(?: ([a-z]+))?", text, re.MULTILINE):
        command = group.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, name
        assert not hasattr(command, "commands") or second in command.commands, f"{name} {second}"
