"""A real run, vLLM and DeepSpeed on the tiny model, as processes of their own that serve their metrics."""

from __future__ import annotations

import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families
from valkey_helpers import free_port

from broker import Server
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE
from broker.processes import METRICS_VARIABLE, Child, Command, family, mark, send
from common.config import Config

ROOT = Path(__file__).parents[2]
RUN = "watched"
PATIENCE_S = 240.0


class LiveRun:
    """Broker service, learner and generator, each with a port for its metrics.

    Args:
        folder: for their output.
        environ: of all of them.
        config: the run's file.
    """

    def __init__(self, folder: Path, environ: dict[str, str], config: Path) -> None:
        self.folder = folder
        self._environ, self._config, self._token = environ, config, secrets.token_hex(8)
        self._children: dict[str, Child] = {}
        self.ports = {name: free_port() for name in ("broker", "learner", "generator")}
        for name in self.ports:
            self.start(name)

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
        for child in self._children.values():
            child.kill()

    def exposition(self, name: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def gauge(self, name: str, family: str) -> float:
        """The sum over a family's samples; 0 while the process or the family is not there."""
        try:
            text = self.exposition(name)
        except OSError:
            return 0.0
        return sum(s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == family)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [name for name, child in self._children.items() if not child.gone and child.exit_code is not None]
            logs = "\n".join(self._children[name].output(4000) for name in ended)
            assert not ended, f"{ended} ended before {what}\n{logs}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}; {self.told()}"
            time.sleep(0.5)

    def told(self) -> str:
        """What to say of a run in which something did not happen."""
        return "\n".join(child.output(1000) for child in self._children.values())


@contextmanager
def tiny_run(folder: Path, model: Path, **sections: dict[str, Any]) -> Iterator[tuple[dict[str, str], Path]]:
    """A server for the run of examples/tiny.yaml, called RUN, with fields of some sections changed: variables for its
    processes, and its file."""
    tree = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    del tree["eval"]
    tree["run"] = {"name": RUN, "id": RUN, "dir": str(folder)}
    tree["model"]["path"] = str(model)
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    config = Config.model_validate(tree)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with Server(config.broker).start(folder) as server:
        yield {
            URL_VARIABLE: server.url, PASSWORD_VARIABLE: server.password, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }, file  # fmt: skip
