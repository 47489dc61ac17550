"""What watching costs: the tiny run with and without page, exporter and `headrace top`, in turns.

    python -m benchmarks.watching [--pairs 8] [--window 30] [--json]

One run goes on the whole time (vLLM, DeepSpeed, the model of examples/tiny.yaml). In every other window the broker
service serves its page and its metrics, one viewer follows the page as a browser does, all three `/metrics` are scraped
as often as the chart has them scraped, and `headrace top` runs on a terminal. The service is started anew for each
window, watched or not, so that both have that in common; what it takes to come up is not counted. The order within a
pair changes from pair to pair. The last line of the output is one JSON object:

- `slowdown`: 1 - (tokens a second watched / unwatched), the mean over the pairs, with its standard error;
- `cpu_share`: processor seconds a second that the watched service, `top`, and the viewer and scraper themselves take
  more than the unwatched service, as a share of the machine's. What the other processes need to answer is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from broker import Broker, Server
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE
from broker.pageguard import url_file
from broker.processes import METRICS_VARIABLE, PAGE_VARIABLE
from common.config import Config

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 8.0
SCRAPE_S = 15.0  # `podMonitor.interval` of the chart
STARTED = time.monotonic()
RUN = "watching"
TOKENS = "vllm:generation_tokens_total"


class Run:
    """The processes of the run; learner and generator stay, the service is started for every window."""

    def __init__(self, folder: Path, config: Config, file: Path, environ: dict[str, str]) -> None:
        self.folder, self.config, self._file = folder, config, file
        self._environ = {**os.environ, **environ}
        self.ports = {"broker": 19400, "learner": 19401, "generator": 19402}
        self.broker = Broker.connect(config.model_copy(update={"broker": config.broker}), reader=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", "from common.cli import main; main()", name, str(self._file)],
                env={**self._environ, **variables}, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

    def generated(self) -> tuple[float, float]:
        """Tokens sampled, counted by the engine at each of its steps, and the time; answers end many at once."""
        text = self.scrape("generator")
        return sum(float(each) for each in re.findall(rf"^{TOKENS}{{.*}} (\S+)$", text, re.MULTILINE)), time.monotonic()

    def scrape(self, name: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=5) as text:
            return str(text.read(), "utf-8")

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}; see its log in {self.folder}")

    @contextmanager
    def service(self, watched: bool) -> Iterator[psutil.Process]:
        variables = {METRICS_VARIABLE: str(self.ports["broker"]), PAGE_VARIABLE: "0"} if watched else {}
        url_file(self.config).unlink(missing_ok=True)
        before = {member.id for member in self.broker.members("broker")}
        process = self.start("broker", **variables)
        try:
            self.until(lambda: any(each.id not in before for each in self.broker.members("broker")))
            if watched:
                self.until(url_file(self.config).exists)
            yield psutil.Process(process.pid)
        finally:
            self.end("broker")

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happens; see the logs in {self.folder}")
            time.sleep(0.2)


class Watchers:
    """A viewer of the page, a scraper, and `headrace top` on a terminal."""

    def __init__(self, run: Run, file: Path, environ: dict[str, str]) -> None:
        self._run, self._stop = run, threading.Event()
        self.scrapes = self.snapshots = 0
        self._own, other = pty.openpty()
        command = [sys.executable, "-c", "from common.cli import main; main()", "top", str(file), "--run-id", RUN]
        self.top = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env={**os.environ, **environ})
        os.close(other)
        works = (self._view, self._scrape, self._drain)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _view(self) -> None:
        url = url_file(self._run.config).read_text()
        with urllib.request.urlopen(url + "events", timeout=30) as stream:
            asked = time.monotonic()
            for line in stream:
                self.snapshots += line.startswith(b"data: {")
                if time.monotonic() - asked > 4:
                    asked = time.monotonic()
                    with urllib.request.urlopen(url + "samples", timeout=30) as samples:
                        samples.read()
                if self._stop.is_set():
                    return

    def _scrape(self) -> None:
        while not self._stop.wait(SCRAPE_S if self.scrapes else 1.0):
            for name in self._run.ports:
                with suppress(OSError):
                    self.scrapes += bool(self._run.scrape(name))

    def _drain(self) -> None:
        with suppress(OSError):
            while os.read(self._own, 65536):
                pass

    def close(self) -> None:
        self._stop.set()
        self.top.terminate()
        self.top.wait(10)
        for thread in self._threads[:2]:
            thread.join(10)
        os.close(self._own)


def cpu_s(*processes: psutil.Process) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def window(run: Run, file: Path, environ: dict[str, str], watched: bool, window_s: float) -> tuple[float, float]:
    """Tokens a second, and processor seconds a second of service and watchers."""
    with run.service(watched) as service, ExitStack() as stack:
        processes = [service]
        if watched:
            watchers = Watchers(run, file, environ)
            stack.callback(watchers.close)
            processes += [psutil.Process(watchers.top.pid), psutil.Process()]
        time.sleep(SETTLE_S)
        used_s, (tokens, began) = cpu_s(*processes), run.generated()
        time.sleep(window_s)
        run.check()
        more, now = run.generated()
        rate, share = (more - tokens) / (now - began), (cpu_s(*processes) - used_s) / (now - began)
        if watched and (watchers.top.poll() is not None or watchers.snapshots < window_s / 4 or not watchers.scrapes):
            raise RuntimeError("the watchers did not watch")
    say(f"{'watched' if watched else 'alone':8} {rate:7.1f} tokens/s, service and watchers {share:.3f} of a processor")
    return rate, share


def say(what: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {what}", file=sys.stderr, flush=True)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Run, Path, dict[str, str]]]:
    """The run at its work."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    del tree["eval"]
    tree["run"] = {"name": RUN, "id": RUN, "dir": str(folder)}
    tree["model"]["path"] = str(ROOT / tree["model"]["path"])
    # Every window has the same work: a policy that learns has answers of another length, and chance how many
    # groups are dropped.
    tree["learner"]["optimizer"]["lr"] = 1e-12
    tree["sampling"]["dynamic_sampling"] = False
    tree["learner"] |= {"max_steps": 1_000_000, "checkpoint_every": 1_000_000, "snapshot_every": 50}
    config = Config.model_validate(tree)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with ExitStack() as stack:
        server = stack.enter_context(Server(config.broker).start(folder))
        environ = {
            URL_VARIABLE: server.url, PASSWORD_VARIABLE: server.password, "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        os.environ.update(environ)
        reached = config.broker.model_copy(update={"url": server.url, "password_file": server.password_file})
        config = config.model_copy(update={"broker": reached})
        run = Run(folder, config, file, environ)
        for name in ("learner", "generator"):
            run.start(name, **{METRICS_VARIABLE: str(run.ports[name])})
            stack.callback(run.end, name)
        with run.service(watched=False):
            say("waiting for the fleet")
            run.until(lambda: run.broker.version() >= 5)
        yield run, file, environ


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"[:\n]", str(__doc__))[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--window", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as (run, file, environ):
        window(run, file, environ, False, arguments.window)  # warms up
        for pair in range(arguments.pairs):
            order = (True, False) if pair % 2 else (False, True)
            found = {watched: window(run, file, environ, watched, arguments.window) for watched in order}
            ratios.append(found[True][0] / found[False][0])
            shares.append((found[True][1] - found[False][1]) / (os.cpu_count() or 1))
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    figures = {
        "slowdown": 1 - statistics.fmean(ratios), "slowdown_error": error, "ratios": ratios,
        "cpu_share": statistics.fmean(shares), "pairs": arguments.pairs, "window_s": arguments.window,
    }  # fmt: skip
    if not arguments.json:
        print(f"slowdown {figures['slowdown']:.2%} (standard error {error:.2%}), processor {figures['cpu_share']:.2%}")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
