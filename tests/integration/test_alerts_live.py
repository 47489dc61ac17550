"""A real run (vLLM and DeepSpeed on the tiny model) and a real Prometheus that scrapes it: every panel shows numbers,
and alerts fire for what is done to the run. Prometheus is not installed with Headrace: Debian has it in the package of
that name; HEADRACE_PROMETHEUS may name it where it is not on the PATH."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_run import RUN, LiveRun, tiny_run
from valkey_helpers import free_port

from common import catalogue
from k8s import dashboards
from tests.alerts.rules import RULES, alerts, exported

PROMETHEUS = os.environ.get("HEADRACE_PROMETHEUS") or shutil.which("prometheus")
PROMTOOL = os.environ.get("HEADRACE_PROMTOOL") or shutil.which("promtool")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        PROMETHEUS is None, reason="prometheus is neither on the PATH nor in HEADRACE_PROMETHEUS (Debian: its package)"
    ),
]
PATIENCE_S = 240.0
# The run has no critic.
_NOT_HERE = ("value_loss", "value_grad_norm", "explained_variance", "return_mean")
ABSENT = {catalogue.family(key) for key in _NOT_HERE}


class World(LiveRun):
    """The run, and the Prometheus that scrapes its processes every second."""

    def __init__(self, folder: Path, environ: dict[str, str], config: Path) -> None:
        super().__init__(folder, environ, config)
        self._port = free_port()
        self._prometheus = self._scrape()

    def close(self) -> None:
        self._prometheus.terminate()
        self._prometheus.wait(30)
        super().close()

    def _scrape(self) -> subprocess.Popen[bytes]:
        """With the rules as they are, but for minutes, which are seconds here."""
        rules = self.folder / "alerts.yaml"
        rules.write_text(re.sub(r"\b(\d+)m\b", r"\1s", RULES.read_text()))
        targets = [f"127.0.0.1:{port}" for port in self.ports.values()]
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "headrace", "static_configs": [{"targets": targets}]}],
        }))  # fmt: skip
        log = (self.folder / "prometheus.log").open("wb")
        return subprocess.Popen(
            [
                str(PROMETHEUS), f"--config.file={self.folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={self.folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query?" + urllib.parse.urlencode({"query": text})
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                tree = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{text}: {error.read().decode()}") from None
        except OSError:  # not up yet
            return []
        found: list[dict[str, Any]] = tree["data"]["result"]
        return found

    def value(self, text: str) -> float:
        return max((float(each["value"][1]) for each in self.query(text)), default=0.0)

    def firing(self) -> set[str]:
        return {each["metric"]["alertname"] for each in self.query('ALERTS{alertstate="firing"}')}

    def told(self) -> str:
        return f"firing: {self.firing()}\n{super().told()}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("watched")
    changes: dict[str, dict[str, Any]] = {
        "reward": {"function": "tests.alerts.live_reward:score"}, "sampling": {"max_response_tokens": 16},
        "broker": {"max_attempts": 1}, "learner": {"max_steps": 100_000, "checkpoint_every": 5, "peak_tflops": 0.05},
    }  # fmt: skip
    with tiny_run(folder, tiny_model, **changes) as (environ, file):
        world = World(folder, {**environ, "HEADRACE_TEST_FAILS": str(folder / "fails")}, file)
        try:
            world.until("ten steps", lambda: world.value("headrace_policy_version") >= 10)
            # What is over a window needs two scrapes of every process in it.
            world.until("all scraped", lambda: world.value("sum(count_over_time(up[10s]) > 5)") >= 3)
            yield world
        finally:
            world.close()


def test_every_panel_shows_numbers(world: World) -> None:
    empty = []
    for board in dashboards.BOARDS:
        for panel in json.loads(dashboards.board(board))["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"].replace("$run", RUN).replace("$__rate_interval", "10s")
                values = [float(series["value"][1]) for series in world.query(text)]
                if not values or any(map(math.isnan, values)):
                    empty.append(f"{board}, {panel['title']}: {text}: {values}")
    assert empty == []


def test_everything_in_the_table_is_exposed(world: World) -> None:
    shown = "".join(world.exposition(name) for name in world.ports)
    found = set(re.findall(r"^(headrace_\w+)\{", shown, re.MULTILINE))
    assert found == set(exported()) - ABSENT


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is neither on the PATH nor in HEADRACE_PROMTOOL")
@pytest.mark.parametrize("name", ["broker", "learner", "generator"])
def test_exposition_is_clean(world: World, name: str) -> None:
    """vLLM's and Python's own names are theirs."""
    own = "".join(line for line in world.exposition(name).splitlines(True) if re.match(r"(# \w+ )?headrace_", line))
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=own, text=True, capture_output=True)
    assert own and (done.returncode, done.stdout + done.stderr) == (0, "")


def test_alerts_fire_for_what_is_done_to_the_run(world: World) -> None:
    done = {"HeadraceNoProgress", "HeadraceDeadLetters", "HeadraceAborts", "HeadraceLearnerStarving"}
    assert done < set(alerts())
    # While vLLM loaded, the learner starved; since answers are short, it does not any more.
    world.until("a run at its work", lambda: not done & world.firing())

    world.signal("learner", signal.SIGSTOP)
    world.until("an alert for the learner that stands still", lambda: "HeadraceNoProgress" in world.firing())
    world.signal("learner", signal.SIGCONT)
    world.until("its end", lambda: "HeadraceNoProgress" not in world.firing())

    (world.folder / "fails").touch()
    world.until("alerts for the reward", lambda: {"HeadraceDeadLetters", "HeadraceAborts"} <= world.firing())
    (world.folder / "fails").unlink()
    world.until("its end", lambda: "HeadraceAborts" not in world.firing())

    world.kill("generator")
    world.until("an alert for the generator that is gone", lambda: "HeadraceLearnerStarving" in world.firing())
