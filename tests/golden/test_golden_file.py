"""The file of reference cases itself: each case has a test, and what is no such file is refused with a reason."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import DEFAULT_FILE, TESTED, Case, LayoutError, load


def test_every_case_of_the_file_has_a_test(golden_path: Path, golden_file_cases: tuple[Case, ...]) -> None:
    for module in Path(__file__).parent.glob("test_golden_*.py"):
        importlib.import_module(module.stem)
    untested = [case.id for case in golden_file_cases if not case.id.startswith(tuple(TESTED))]
    assert not untested, f"no test for these cases of {golden_path}: {', '.join(untested)}"


def test_every_test_has_a_case_in_our_own_file() -> None:
    ids = [case.id for case in load(DEFAULT_FILE)]
    assert not [name for name in TESTED if not any(case_id.startswith(name) for case_id in ids)]


GOOD = {"id": "lr_warmup", "inputs": {"lr": 1}, "outputs": {"x": 1}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read as JSON"),
        ([GOOD], "a list `cases`"),
        ({"cases": []}, "not empty"),
        ({"cases": [{"inputs": {}, "outputs": {}}]}, r"cases\[0\] has no text `id`"),
        ({"cases": [{**GOOD, "inputs": [1]}]}, "case lr_warmup: expected an object `inputs`"),
        ({"cases": [{**GOOD, "outputs": 1}]}, "case lr_warmup: .*`outputs`"),
        ({"cases": [GOOD, GOOD]}, "lr_warmup are there twice"),
        ({"cases": [{**GOOD, "inputs": {"second": {"lr": 2}}}]}, "`second` must be in both"),
        ({"cases": [{**GOOD, "outputs": {"second": {"x": 2}}}]}, "`second` must be in both"),
    ],
)
def test_file_of_another_layout_refused_with_the_place(content: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(LayoutError, match=f"golden.json: .*{reason}"):
        load(path)


def test_second_setting_is_a_case_that_overrides_the_inputs_it_names(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    case = {"id": "a", "inputs": {"x": 1, "cap": 2, "second": {"cap": 3}}, "outputs": {"y": 4, "second": {"y": 5}}}
    path.write_text(json.dumps({"meta": {}, "cases": [case]}))
    first, second = load(path)
    assert (first.id, first.inputs, first.outputs) == ("a", {"x": 1, "cap": 2}, {"y": 4})
    assert (second.id, second.inputs, second.outputs) == ("a-second", {"x": 1, "cap": 3}, {"y": 5})


def test_missing_field_fails_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"cases": [GOOD]}))
    with pytest.raises(pytest.fail.Exception, match=r"no lr_warmup\.inputs\.warmup; it has lr"):
        load(path)[0].inputs["warmup"]
