"""Alerts speak of what is exposed, and each has a run book and a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from common.cli import app
from common.config import Config

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
