"""What watching costs: the tiny run with and without page, exporter and `headrace top`, in turns.

    python -m benchmarks.watching [--pairs 12] [--window 20] [--times 8] [--json]

One run goes on the whole time (vLLM, DeepSpeed, the model of examples/tiny.yaml). A watcher is a broker service with
page and metrics, a viewer that follows the page as a browser does, a scraper that asks all three `/metrics` as often as
the chart does, and `headrace top` on a terminal. What one of them costs is less than the machine's speed varies by, so
there are several at once. In every other window they are stopped (SIGSTOP), and as many services that nobody watches
work in their place. The order within a pair changes from pair to pair. The last line of the output is one JSON object:

- `slowdown`: 1 - (tokens a second watched / unwatched), the mean over the pairs, divided by the number of watchers,
  with its standard error;
- `cpu_share`: what a watcher's processes, the viewer and the scraper included, take of the machine's processors, less
  what a service takes that nobody watches. What the run's processes need to answer is not in it.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from broker import Broker, Server
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE
from broker.processes import METRICS_VARIABLE, PAGE_VARIABLE
from common.config import Config

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 4.0
SCRAPE_S = 15.0  # `podMonitor.interval` of the chart
STARTED = time.monotonic()
RUN = "watching"
TOKENS = "vllm:generation_tokens_total"
METRICS = {"learner": 19401, "generator": 19402}
WATCHERS = 19410  # the first of their ports


class Run:
    """The processes of the run, on this machine."""

    def __init__(self, folder: Path, config: Config, file: Path) -> None:
        self.folder, self._file = folder, file
        self.broker = Broker.connect(config, reader=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: str, variables: Mapping[str, str], terminal: int | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            out: Any = log if terminal is None else terminal
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", "from common.cli import main; main()", *command.split(), str(self._file)],
                env={**os.environ, **variables}, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                start_new_session=True,
            )  # fmt: skip
        return self.processes[name]

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def sampled(self) -> tuple[float, float]:
        """Tokens, counted by the engine at each of its steps, and the time; answers would end many at once."""
        found = re.findall(rf"^{TOKENS}{{.*}} (\S+)$", scrape(METRICS["generator"]), re.MULTILINE)
        return sum(map(float, found)), time.monotonic()

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}; see its log in {self.folder}")

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happens; see the logs in {self.folder}")
            time.sleep(0.2)


def scrape(port: int) -> str:
    return ask(f"http://127.0.0.1:{port}/metrics")


def ask(url: str, timeout_s: float | None = 10.0) -> str:
    with urllib.request.urlopen(url, timeout=timeout_s) as text:
        return str(text.read(), "utf-8")


class Watcher:
    """A service with a page and metrics, a viewer of the page, a scraper, and `headrace top` on a terminal; and a
    service without all that. Either the former work (`go`) or the latter (`stop`)."""

    def __init__(self, run: Run, number: int, first_scrape_s: float) -> None:
        page, self._metrics = WATCHERS + 2 * number, WATCHERS + 2 * number + 1
        self._page = f"http://127.0.0.1:{page}/"
        self.snapshots = self.scrapes = 0
        self._awake, self._first_s = threading.Event(), first_scrape_s
        ports = {PAGE_VARIABLE: str(page), METRICS_VARIABLE: str(self._metrics)}
        service = run.start(f"watcher-{number}", "broker", ports)
        run.until(self._answers)
        self._own, other = pty.openpty()
        top = run.start(f"top-{number}", f"top --run-id {RUN}", {}, other)
        os.close(other)
        self._watched = [psutil.Process(each.pid) for each in (service, top)]
        self._alone = [psutil.Process(run.start(f"alone-{number}", "broker", {}).pid)]
        for work in (self._view, self._scrape, self._drain):
            threading.Thread(target=work, daemon=True).start()

    def go(self) -> None:
        self._change(self._alone, self._watched)
        self._awake.set()

    def stop(self) -> None:
        self._awake.clear()
        self._change(self._watched, self._alone)

    def cpu_s(self) -> float:
        return sum(map(cpu_s, [*self._watched, *self._alone]))

    def _change(self, out: list[psutil.Process], on: list[psutil.Process]) -> None:
        for process in out:
            process.suspend()
        for process in on:
            process.resume()

    def _answers(self) -> bool:
        with suppress(OSError):
            return bool(ask(self._page) and scrape(self._metrics))
        return False

    def _view(self) -> None:
        with urllib.request.urlopen(self._page + "events") as stream:
            asked = time.monotonic()
            for line in stream:
                self.snapshots += line.startswith(b"data: {")
                if time.monotonic() - asked > 4:
                    asked = time.monotonic()
                    ask(self._page + "history", None)
                    ask(self._page + "samples", None)

    def _scrape(self) -> None:
        time.sleep(self._first_s)
        while True:
            self._awake.wait()
            for port in (self._metrics, *METRICS.values()):
                with suppress(OSError):  # it was stopped meanwhile
                    self.scrapes += bool(scrape(port))
            time.sleep(SCRAPE_S)

    def _drain(self) -> None:
        with suppress(OSError):
            while os.read(self._own, 65536):
                pass


def cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def window(run: Run, watchers: list[Watcher], watched: bool, window_s: float) -> tuple[float, float]:
    """Tokens a second, and processor seconds a second of the watchers."""
    own = psutil.Process()
    for watcher in watchers:
        watcher.go() if watched else watcher.stop()
    time.sleep(SETTLE_S)
    used_s = cpu_s(own) + sum(watcher.cpu_s() for watcher in watchers)
    snapshots, (tokens, began) = [watcher.snapshots for watcher in watchers], run.sampled()
    time.sleep(window_s)
    run.check()
    more, now = run.sampled()
    used_s = cpu_s(own) + sum(watcher.cpu_s() for watcher in watchers) - used_s
    seen = [watcher.snapshots - before for watcher, before in zip(watchers, snapshots, strict=True)]
    if watched != (min(seen) > window_s / 2) or (watched and not all(watcher.scrapes for watcher in watchers)):
        raise RuntimeError(f"watched: {watched}, but the pages brought {seen} snapshots")
    rate, share = (more - tokens) / (now - began), used_s / (now - began)
    say(f"{'watched' if watched else 'alone':8} {rate:7.1f} tokens/s, watchers {share:.3f} of a processor")
    return rate, share


def say(what: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {what}", file=sys.stderr, flush=True)


@contextmanager
def opened(folder: Path) -> Iterator[Run]:
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
        os.environ.update({
            URL_VARIABLE: server.url, PASSWORD_VARIABLE: server.password, "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        })  # fmt: skip
        reached = config.broker.model_copy(update={"url": server.url, "password_file": server.password_file})
        run = Run(folder, config.model_copy(update={"broker": reached}), file)
        stack.callback(run.end)
        for name, port in METRICS.items():
            run.start(name, name, {METRICS_VARIABLE: str(port)})
        run.start("broker", "broker", {})
        say("waiting for the fleet")
        run.until(lambda: run.broker.version() >= 5)
        yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"[:\n]", str(__doc__))[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--window", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--times", type=int, default=8, metavar="WATCHERS")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    times, ratios, shares = arguments.times, [], []
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as run:
        watchers = [Watcher(run, number, SCRAPE_S * number / times) for number in range(times)]
        say(f"{times} watchers")
        time.sleep(SCRAPE_S)
        for pair in range(arguments.pairs):
            order = (True, False) if pair % 2 else (False, True)
            found = {watched: window(run, watchers, watched, arguments.window) for watched in order}
            ratios.append(found[True][0] / found[False][0])
            shares.append((found[True][1] - found[False][1]) / (os.cpu_count() or 1))
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    figures = {
        "slowdown": (1 - statistics.fmean(ratios)) / times, "slowdown_error": error / times, "ratios": ratios,
        "cpu_share": statistics.fmean(shares) / times, "times": times, "pairs": arguments.pairs,
        "window_s": arguments.window,
    }  # fmt: skip
    if not arguments.json:
        print(f"slowdown {figures['slowdown']:.2%} (standard error {error / times:.2%}) a watcher, "
              f"processors {figures['cpu_share']:.2%}")  # fmt: skip
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
