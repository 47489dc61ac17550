"""What the documents show is true: the page of fields is current, the YAML parses, the links lead somewhere, the
site has every page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", _prose(page))
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    pages = [((page.parent / target) if target else page, anchor) for target, anchor in links if anchor]
    assert [f"{to.name}#{anchor}" for to, anchor in pages if anchor not in _anchors(to)] == []


def test_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = sorted(_pages(site["nav"]))
    ours = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert pages == sorted([*ours, "index.md", "results.md"])  # those two are made by docs/site_hooks.py
    text = (ROOT / "docs" / "site_hooks.py").read_text()
    named = dict(re.findall(r'"([\w/]+\.md)": "([\w/]+\.md)"', text))
    assert sorted(named.values()) == ["index.md", "results.md"] and all((ROOT / path).is_file() for path in named)


def test_pictures_are_shown_and_carry_their_words() -> None:
    """Everyone who cannot see a picture gets its alternative text; each follows the reader's light or dark setting."""
    picture = re.compile(r"!\[([^\]]*)\]\((?:docs/)?(img/[^)]+\.svg)\)")
    shown = [found for page in PAGES for found in picture.findall(page.read_text())]
    assert sorted({path for _, path in shown}) == sorted(f"img/{p.name}" for p in (ROOT / "docs/img").glob("*.svg"))
    assert all(len(words) > 40 for words, _ in shown)
    for path in (ROOT / "docs/img").glob("*.svg"):
        assert "prefers-color-scheme: dark" in path.read_text() and ElementTree.parse(path).getroot().get("viewBox")


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings, of which docs/site_hooks.py makes the same."""
    headings = re.findall(r"^#+ +(.+?) *$", _prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def _pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from _pages(target)
