"""MkDocs hooks: what lies outside of docs/ and belongs on the site, and links that work there and on GitHub alike.

Pages link to each other, and out of docs/, by relative paths, as GitHub wants it. On the site a link to a file that has
a page there leads to that page; any other leads to the repository, `HEADRACE_REPOSITORY` (for example
https://git.example/headrace/blob/main), and where that is not set is only its text. Needs MkDocs; see `make site`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
DOCS = "docs"
# Written once, shown twice: file of the repository -> page of the site.
PAGES = {"README.md": "index.md", "benchmarks/RESULTS.md": "results.md"}
PICTURES = "benchmarks/curves"  # of RESULTS.md
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as GitHub makes them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"curves/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    sources = {shown: source for source, shown in PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, posixpath.join(DOCS, page.file.src_uri)))

    def adapted(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.group(1), match.group(2), match.group(3), match.group(4) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PAGES:
            return f"{mark}[{text}]({PAGES[path]}{anchor})"
        for shown_in in (f"{DOCS}/", f"{posixpath.dirname(PICTURES)}/"):
            inside = path.removeprefix(shown_in)
            if inside != path and files.get_file_from_path(inside) is not None:
                return f"{mark}[{text}]({inside}{anchor})"
        repository = os.environ.get("HEADRACE_REPOSITORY")
        return f"[{text}]({repository.rstrip('/')}/{path}{anchor})" if repository else text

    return _LINK.sub(adapted, markdown)
