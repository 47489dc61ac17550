"""What the documents show is true: the page of fields is current, the YAML parses, the links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "k8s" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(yaml.safe_load(text), id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


def test_generated_pages_are_what_the_code_says() -> None:
    code = (
        "import sys; sys.path.insert(0, 'docs'); import generate as g\n"
        "sys.exit(', '.join(path.name for path, text in g.pages().items() if text != path.read_text()) or None)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"out of date: {done.stderr.strip()}; run `make docs`"


@pytest.mark.parametrize("sections", SNIPPETS)
def test_yaml_snippet_is_part_of_a_valid_configuration(sections: dict[str, Any]) -> None:
    base = {
        "run": {"name": "docs"},
        "model": {"path": "models/tiny"},
        "prompts": {"type": "dataset", "path": "train.jsonl"},
        "reward": {"type": "math_verify"},
    }
    Config.model_validate({**base, **sections})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
