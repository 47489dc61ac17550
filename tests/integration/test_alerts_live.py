"""A real run (vLLM and DeepSpeed on the tiny model) and a real Prometheus that scrapes it: every panel shows numbers,
and alerts fire for what is done to the run. Prometheus is not installed with Headrace: Debian has it in the package of
that name; HEADRACE_PROMETHEUS may name it where it is not on the PATH."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from valkey_helpers import free_port

from broker import Server
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE
from broker.processes import METRICS_VARIABLE, Child, Command, family, mark, send
from common import catalogue
from common.config import Config
from k8s import dashboards
from tests.alerts.rules import ROOT, RULES, alerts, exported

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
# The run has neither critic nor reference, and the step is the version.
_NOT_HERE = ("value_loss", "value_grad_norm", "explained_variance", "return_mean", "step")
ABSENT = {catalogue.family(key) for key in _NOT_HERE}


class World:
    """The run's processes, each with a port, and the Prometheus that scrapes them every second."""

    def __init__(self, folder: Path, environ: dict[str, str], config: Path) -> None:
        self.folder, self.run = folder, "watched"
        self._environ, self._config, self._token = environ, config, secrets.token_hex(8)
        self._children: dict[str, Child] = {}
        self.ports = {name: free_port() for name in ("broker", "learner", "generator")}
        for name in self.ports:
            self.start(name)
        self._port = free_port()
        self._prometheus = self._scrape()

    def start(self, name: str) -> None:
        argv = (sys.executable, "-c", "from common.cli import main; main()", name, str(self._config))
        environ = {**self._environ, METRICS_VARIABLE: str(self.ports[name])}
        self._children[name] = Child(Command(name, name, argv, environ), self._token, self.folder)

    def signal(self, name: str, number: signal.Signals) -> None:
        child = self._children[name]
        send(family(mark(self._token, name), [child.pid]), number)

    def kill(self, name: str) -> None:
        self._children[name].kill()

    def close(self) -> None:
        self._prometheus.terminate()
        self._prometheus.wait(30)
        for child in self._children.values():
            child.kill()

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

    def exposition(self, name: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [name for name, child in self._children.items() if not child.gone and child.exit_code is not None]
            logs = "\n".join(self._children[name].output(4000) for name in ended)
            assert not ended, f"{ended} ended before {what}\n{logs}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}; firing: {self.firing()}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("watched")
    tree = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    del tree["eval"]
    tree["run"] = {"name": "watched", "id": "watched", "dir": str(folder)}
    tree["model"]["path"] = str(tiny_model)
    tree["reward"]["function"] = "tests.alerts.live_reward:score"
    tree["sampling"]["max_response_tokens"] = 16
    tree["broker"] = {"max_attempts": 1}
    tree["learner"] |= {"max_steps": 100_000, "checkpoint_every": 5}
    config = Config.model_validate(tree)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with Server(config.broker).start(folder) as server:
        environ = {
            URL_VARIABLE: server.url, PASSWORD_VARIABLE: server.password, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HEADRACE_TEST_FAILS": str(folder / "fails"),
        }  # fmt: skip
        world = World(folder, environ, file)
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
                text = target["expr"].replace("$run", world.run).replace("$__rate_interval", "10s")
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
