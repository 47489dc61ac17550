"""Nodes of an elastic learner that come, leave and die: torchrun's real agent, with ranks that compute nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from broker import Broker, Server
from broker.elastic import hosting
from broker.processes import kill_family
from common import log as logs
from common.config import Config

DRIVER = Path(__file__).with_name("node_driver.py")
ROOT = DRIVER.parents[2]
PATIENCE_S = 100.0


class Nodes:
    """The nodes of one learner, and where they meet."""

    def __init__(self, config: Config, folder: Path, password: str) -> None:
        self.folder, self.config = folder, config
        self.broker = Broker.connect(config)
        (folder / "worlds").mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()
        self.host()

    def host(self) -> None:
        """As the broker service does; a second time: it was started again."""
        self.end_host()
        self._closing = closing = threading.Event()
        hosted = threading.Event()

        def serve() -> None:
            with hosting(self.broker, self.config, logs.setup("test", "test")):
                hosted.set()
                closing.wait()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert hosted.wait(60)

    def end_host(self) -> None:
        if hasattr(self, "_thread"):
            self._closing.set()
            self._thread.join()

    def start(self, *names: str) -> None:
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                self._running[name] = subprocess.Popen(
                    [sys.executable, str(DRIVER), str(self.folder / "config.yaml"), name, str(self.folder)],
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                    stderr=log,
                    start_new_session=True,
                )

    def stop(self, name: str) -> None:
        self._running[name].terminate()

    def kill(self, name: str) -> None:
        kill_family("no mark/", [self._running[name].pid])

    def code(self, name: str) -> int:
        return self._running[name].wait(PATIENCE_S)

    def await_world(self, size: int) -> None:
        """Until a world of this size counts that did not before."""
        file, since, deadline = self.folder / "worlds" / str(size), time.time(), time.monotonic() + PATIENCE_S
        while not (file.exists() and file.stat().st_mtime > since):
            assert time.monotonic() < deadline, f"no world of {size}: {(self.folder / 'rounds').read_text()}"
            time.sleep(0.05)

    @property
    def first(self) -> str:
        """The node of rank 0."""
        lines = (self.folder / "rounds").read_text().splitlines()
        return next(line.split()[0] for line in reversed(lines) if " 0/" in line)

    def close(self) -> None:
        for name, process in self._running.items():
            self.kill(name)
            process.wait()
        self.end_host()
        self.broker.close()


@pytest.fixture
def nodes(make_config: Callable[..., Config], valkey: Server, tmp_path: Path) -> Iterator[Nodes]:
    config = make_config(learner={"elastic": {"min_nodes": 1, "max_nodes": 2, "max_failures": 2}})
    made = Nodes(config, tmp_path, valkey.password)
    yield made
    made.close()


@pytest.mark.long
def test_nodes_go_on_without_rank_0_and_with_a_new_broker_service(nodes: Nodes) -> None:
    nodes.start("a", "b")
    nodes.await_world(2)
    lost = nodes.first
    nodes.kill(lost)
    nodes.await_world(1)
    nodes.host()
    nodes.await_world(1)
    left = ({"a", "b"} - {lost}).pop()
    nodes.broker.finish()
    (nodes.folder / "done").touch()
    assert nodes.code(left) == 0


@pytest.mark.parametrize("saved", [True, False])
def test_node_told_to_stop_says_whether_its_rank_could_save(nodes: Nodes, saved: bool) -> None:
    if not saved:
        (nodes.folder / "unsaved").touch()
    nodes.start("a")
    nodes.await_world(1)
    nodes.stop("a")
    assert nodes.code("a") == (0 if saved else 1)


def test_node_with_a_permanent_error_is_not_started_again(nodes: Nodes) -> None:
    (nodes.folder / "broken").touch()
    nodes.start("a")
    assert nodes.code("a") == 2
    assert (nodes.folder / "rounds").read_text() == "a 0/1\n"
