"""The live page of a real run (`headrace up`: vLLM and DeepSpeed on the tiny model) in a real browser.

The browser is not installed with Headrace: Debian has it in the package `chromium` (HEADRACE_CHROMIUM may name
another), and `pip install playwright` brings what drives it. With HEADRACE_SCREENSHOTS the pictures of the documents
are written to that folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml
from broker_helpers import group

from broker import Broker
from broker.clients import Endpoint
from broker.server import read_endpoint
from broker.sources import load_tokenizer
from common import wire
from common.config import Config

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("HEADRACE_CHROMIUM") or shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is neither on the PATH nor in HEADRACE_CHROMIUM"),
]
PATIENCE_S = 300.0
SCRIPT = "<script>document.title='broken in'</script>"
STATIONS = ("released", "trained", "settled", "filtered", "expired", "dead")


class Up:
    """`headrace up`, and what it prints."""

    def __init__(self, config: Config, file: Path) -> None:
        file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        argv = [sys.executable, "-c", "from common.cli import main; main()", "up", str(file)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(argv, cwd=ROOT, env=environ, start_new_session=True, **pipes)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def said(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, "".join(self.lines))):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.1)
        return found[1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE_S)
        self._reader.join(10)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[tuple[Config, Up]]:
    tree = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    del tree["eval"]
    tree["run"] = {"name": "tiny", "id": "tiny-page", "dir": str(tmp_path)}
    tree["model"]["path"] = str(tiny_model)
    tree["learner"] |= {"max_steps": 20, "snapshot_every": 5, "checkpoint_every": 20}
    config = Config.model_validate(tree)
    up = Up(config, tmp_path / "run.yaml")
    try:
        yield config, up
    finally:
        up.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def _plant(broker: Broker, config: Config) -> None:
    """Hand in a group whose answers, and whose prompt, are a script."""
    ids = np.array(load_tokenizer(config).encode(SCRIPT, add_special_tokens=False), dtype=np.int32)
    for lease in broker.lease("planted", 1, 500):
        made = group(lease.prompt.group_id, broker.version(), config.sampling.group_size)
        response = replace(made.responses[0], token_ids=ids, logprobs=np.full(len(ids), -6.0, dtype=np.float32))
        made = replace(
            made, responses=(response,) * config.sampling.group_size, prompt_ids=lease.prompt.token_ids,
            released_version=lease.prompt.released_version,
        )  # fmt: skip
        prompt = wire.encode_prompt(replace(lease.prompt, text=SCRIPT))
        assert broker.submit("planted", replace(lease, entry=(b"", prompt)), made)


def test_page_of_a_real_run(run: tuple[Config, Up], browser: Any) -> None:
    config, up = run
    url = up.said(r"the run as a page: (\S+)")
    hosts, wrong = set[str](), list[str]()

    def visit(width: int, height: int, scheme: str = "light", scale: float = 1.0) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
        )
        page = context.new_page()
        page.on("request", lambda request: hosts.add(str(urlsplit(request.url).hostname)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        return page

    def number(page: Any, station: str) -> int:
        text = page.text_content(f"#station-{station}")
        return int(text.replace(",", "")) if text[:1].isdigit() else -1

    def until(page: Any, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert up.process.poll() is None or "finished" in what, "".join(up.lines)
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}\n{page.inner_text('body')}"
            page.wait_for_timeout(200)

    # Three browsers of this machine would only slow the loading down.
    steps = config.run.folder / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (steps.exists() and steps.stat().st_size):
        assert up.process.poll() is None and time.monotonic() < deadline, "".join(up.lines)
        time.sleep(0.2)
    desktop, phone, dark = visit(1280, 900), visit(390, 844, scale=1.5), visit(1280, 900, "dark")
    until(desktop, "a first step", lambda: number(desktop, "trained") > 0)
    before = [number(desktop, station) for station in ("released", "trained")]
    until(desktop, "numbers move", lambda: number(desktop, "trained") >= before[1] + 8)
    assert number(desktop, "released") > before[0] and desktop.text_content("#status") == "live"
    assert desktop.locator("#members tbody tr").count() == 3 and "generator-0" in desktop.inner_text("#members")
    desktop.wait_for_selector("#curves canvas")
    assert desktop.locator("#curves canvas").count() == 9

    broker = Broker.connect(config, Endpoint(*read_endpoint(config.run.folder)))

    def planted_shows() -> bool:
        _plant(broker, config)
        return SCRIPT in desktop.text_content("#samples")

    until(desktop, "the planted answer", planted_shows)
    broker.close()
    assert desktop.locator("#samples script").count() == 0 and "broken in" not in desktop.title()

    if folder := os.environ.get("HEADRACE_SCREENSHOTS"):
        until(desktop, "curves worth a picture", lambda: number(desktop, "trained") >= 44)
        for name, page in (("page", desktop), ("page-phone", phone), ("page-dark", dark)):
            page.screenshot(path=Path(folder) / f"{name}.png")
    for page in (phone, dark):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"

    until(desktop, "it is finished", lambda: desktop.text_content("#status").startswith("finished"))
    up.process.wait(PATIENCE_S)
    audit = json.loads((config.run.folder / "audit.json").read_text())
    audit["filtered"] = sum(audit[f"filtered_{kind}"] for kind in ("correct", "wrong", "equal"))
    assert up.process.returncode == 0, "".join(up.lines)
    assert {name: number(desktop, name) for name in STATIONS} == {name: audit[name] for name in STATIONS}
    assert f"{audit['outstanding']} of at most" in desktop.inner_text("#budget-text")
    desktop.wait_for_timeout(3000)  # a page of a run that is over asks for nothing more
    assert wrong == [] and hosts == {"127.0.0.1"}
