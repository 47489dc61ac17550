"""`python -m tests.chaos.elastic [--json] [--only planned|killed]`: a learner of 2, 3, 1 and 2 nodes in one live run.

The learner is the real one (DeepSpeed, gloo, the tiny model); generators are the light ones of `tests.chaos`. Once
nodes are told to leave, once they are killed with their ranks; both times rank 0's is among them. Exit code 0: the
runs ended at their last step, every process with 0, the audit holds, each step trained a full batch, and no more was
lost than the steps since the newest snapshot (planned: none). Every change is timed by parts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from broker import Broker, Server
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE
from broker.processes import kill_family
from common.config import Config
from learner import checkpoint

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS, SNAPSHOTS, GENERATORS = 60, 4, 5, 1
SLOW_S, FAST_S = 0.6, 0.02  # median of an answer: during the changes, and to the end
PATIENCE_S = 120.0
LIMIT_S = 45.0

_FORMED = re.compile(r"round formed: node (\d+) of (\d+)")
_READY = re.compile(r"model and optimizer ready at version (\d+), (\d+) ranks")
_FIRST = re.compile(r"first step ([\d.]+) s after the start: (.*)")
_ENDED = re.compile(r"the ranks have (left|failed)|the ranks leave")


@dataclass
class Change:
    """One change of size. Seconds: from the signal or the start of a node to the first step at the new size.

    `parts`: detection (of a loss; of a leave: the step's end and the snapshot; of a node that comes: its own start,
    too), rendezvous, then what the rank 0 of the new round says. `lost_steps` were trained and are not in its weights.
    """

    how: str
    before: int
    after: int
    seconds: float = 0.0
    lost_steps: int = 0
    allowed: int = 0
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    at: float
    name: str
    text: str


class Process:
    """A process whose lines are kept with the time of their arrival."""

    def __init__(self, name: str, argv: list[str], world: World) -> None:
        self.name, self._world = name, world
        self._process = subprocess.Popen(
            argv, cwd=ROOT, env=world.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with (self._world.folder / f"{self.name}.log").open("a") as log:
            for text in self._process.stdout:
                log.write(text)
                log.flush()
                self._world.lines.append(Line(time.time(), self.name, text))

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """With all that descends from it: the node is gone."""
        kill_family("no mark/", [self._process.pid])
        self._process.wait()


class World:
    """One run."""

    def __init__(self, how: str, folder: Path, seed: int) -> None:
        self.how, self.folder, self.lines = how, folder, list[Line]()
        self.changes: list[Change] = []
        self.problems: list[str] = []
        self._rng = random.Random(seed)
        self._nodes: dict[str, Process] = {}
        self._others: list[Process] = []
        self._number = 0

    def run(self) -> None:
        tree = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
        del tree["eval"]
        tree["run"] = {"name": "elastic", "id": "elastic", "dir": str(self.folder)}
        tree["model"] = {"path": str(ROOT / "models" / "tiny")}
        tree["sampling"] = {"group_size": 2, "max_prompt_tokens": 8, "max_response_tokens": 16}
        tree["weights"] = {"backend": "gloo"}
        tree["learner"] |= {
            "groups_per_step": GROUPS, "max_steps": STEPS, "checkpoint_every": 1000, "snapshot_every": SNAPSHOTS,
            "elastic": {"min_nodes": 1, "max_nodes": 3},
        }  # fmt: skip
        self.config = Config.model_validate(tree)
        self.config.run.folder.mkdir(parents=True)
        self._config_file = self.folder / "config.yaml"
        self._config_file.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        with Server(self.config.broker).start(self.config.run.folder) as server:
            self.environ = {
                **os.environ, URL_VARIABLE: server.url, PASSWORD_VARIABLE: server.password or "",
                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            os.environ.update({name: self.environ[name] for name in (URL_VARIABLE, PASSWORD_VARIABLE)})
            self.broker = Broker.connect(self.config)
            try:
                self._play()
                self._judge()
            finally:
                for process in (*self._nodes.values(), *self._others):
                    process.kill()
                self.broker.close()

    # --- the play

    def _play(self) -> None:
        self._pace(SLOW_S)
        players = [sys.executable, "-m", "tests.chaos.elastic_players"]
        self._others = [Process("service", [*players, "service", str(self._config_file)], self)]
        for number in range(GENERATORS):
            name = f"generator-{number}"
            self._others.append(Process(name, [*players, "generator", str(self._config_file), name], self))
        self._change("start", 0, 2, lambda: self._start(2))
        self._change("join", 2, 3, lambda: self._start(1))
        self._change(self.how, 3, 1, self._remove_two)
        self._change("join", 1, 2, lambda: self._start(1))
        self._pace(FAST_S)
        self._await("the end", lambda: all(node.code is not None for node in self._nodes.values()))

    def _pace(self, seconds: float) -> None:
        file = self.config.run.folder / "pace"
        file.with_suffix(".new").write_text(str(seconds))
        file.with_suffix(".new").rename(file)

    def _start(self, nodes: int) -> None:
        for _ in range(nodes):
            name = f"node-{self._number}"
            self._number += 1
            argv = [sys.executable, "-c", "from common.cli import main; main()", "learner", str(self._config_file)]
            self._nodes[name] = Process(name, argv, self)

    def _remove_two(self) -> None:
        """The node of rank 0 and another one."""
        first = next(line.name for line in reversed(self.lines) if "round formed: node 0 of 3" in line.text)
        second = self._rng.choice([name for name in self._nodes if name != first])
        gone = [self._nodes.pop(name) for name in (first, second)]
        for node in gone:
            node.terminate() if self.how == "planned" else node.kill()
        if self.how == "planned":
            self._others += gone  # judged at the end

    def _change(self, how: str, before: int, after: int, act: Callable[[], None]) -> None:
        """Make a change, wait for the first step at the new size and for a few more."""
        time.sleep(self._rng.uniform(0.0, 1.0))  # at any moment of a step
        change = Change(how, before, after)
        started, trained = time.time(), self._version()
        durable = self._durable()
        act()
        survivors = set(self._nodes)
        where = lambda line: line.at >= started and line.name in survivors  # noqa: E731
        ranks = f", {after} ranks"
        self._await(
            f"{after} ranks",
            lambda: any(
                where(line) and ranks in line.text and any(_FIRST.search(more.text) for more in self._after(line))
                for line in list(self.lines)
            ),
        )
        lines = [line for line in list(self.lines) if where(line)]
        ready = next(line for line in reversed(lines) if ranks in line.text)
        first = next(line for line in self._after(ready) if _FIRST.search(line.text))
        formed = [line for line in lines if _FORMED.search(line.text) and line.at <= first.at]
        ended = [line for line in lines if _ENDED.search(line.text) and line.at <= formed[-1].at]
        found = _FIRST.search(first.text)
        version = _READY.search(ready.text)
        assert found is not None and version is not None
        change.seconds = round(first.at - started, 1)
        detected = min((line.at for line in ended), default=started)
        change.parts = {
            "detection": round(detected - started, 1),
            "rendezvous": round(formed[-1].at - detected, 1),
            **{name: float(seconds) for name, seconds in re.findall(r"([a-z]+) ([\d.]+)", found[2])},
        }
        trained = max([trained, *(v for at, v in self._versions() if at < ready.at)])
        change.lost_steps = trained - int(version[1])
        change.allowed = trained - durable if how == "killed" else 0
        self.changes.append(change)
        self._await("a few more steps", lambda: self._version() >= int(version[1]) + 4)

    def _after(self, ready: Line) -> list[Line]:
        lines = list(self.lines)
        return lines[lines.index(ready) + 1 :]

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.time() + PATIENCE_S
        while not holds():
            if time.time() > deadline:
                raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s; see the logs in {self.folder}")
            time.sleep(0.05)

    # --- what happened

    def _records(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.config.run.folder / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def _versions(self) -> list[tuple[float, int]]:
        """Versions made, with the time at which their lines came."""
        found = [(line.at, re.search(r" step (\d+): ", line.text)) for line in list(self.lines)]
        return [(at, int(match[1])) for at, match in found if match]

    def _version(self) -> int:
        versions = self._versions()
        return versions[-1][1] if versions else 0

    def _durable(self) -> int:
        folder = checkpoint.newest(*self.config.save_folders)
        return checkpoint.read_state(folder).version if folder is not None else 0

    def _expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def _judge(self) -> None:
        codes = {process.name: process.wait(30.0) for process in (*self._nodes.values(), *self._others)}
        self._expect(set(codes.values()) == {0}, f"not all ended with 0: {codes}")
        ledger = self.broker.ledger()
        self._expect(ledger.balanced, f"the audit does not balance: {ledger}")
        self._expect(
            ledger.trained == ledger.settled == STEPS * GROUPS,
            f"{STEPS} steps of {GROUPS} groups: trained {ledger.trained}, settled {ledger.settled}",
        )
        self._expect(self._durable() == STEPS, f"the newest checkpoint is of version {self._durable()}")
        records = self._records()
        self._expect({record["groups"] for record in records} == {float(GROUPS)}, "a step was not of a full batch")
        rates = {(record["version"], record["learning_rate"]) for record in records}
        self._expect(len(rates) == STEPS, "a step that was made twice had another learning rate")
        self._expect({record["version"] for record in records} == set(range(1, STEPS + 1)), "a version is missing")
        for change in self.changes:
            text = f"{change.how} {change.before} -> {change.after}"
            self._expect(change.lost_steps <= change.allowed, f"{text}: {change.lost_steps} steps lost")
            self._expect(change.seconds < LIMIT_S or change.how == "start", f"{text}: {change.seconds} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.elastic", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", choices=("planned", "killed"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = Path(tempfile.mkdtemp(prefix="elastic-"))
    report: dict[str, Any] = {}
    failed = False
    for how in ("planned", "killed") if options.only is None else (options.only,):
        world, started = World(how, root / how, options.seed), time.monotonic()
        try:
            world.run()
        except (TimeoutError, AssertionError, SystemExit) as error:  # what was measured until then is still reported
            world.problems.append(f"ended early: {error}")
        failed = failed or bool(world.problems)
        seconds = round(time.monotonic() - started, 1)
        changes = [asdict(change) for change in world.changes]
        report[how] = {"problems": world.problems, "seconds": seconds, "changes": changes}
        if not options.json:
            print(f"{how}: {'; '.join(world.problems) or 'ok'} ({seconds:.0f} s)")
            for change in world.changes:
                parts = ", ".join(f"{part} {s:.1f}" for part, s in change.parts.items())
                print(f"  {change.how:8} {change.before} -> {change.after}: {change.seconds:5.1f} s, "
                      f"{change.lost_steps} steps lost; {parts}", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({"limit_s": LIMIT_S, **report}, indent=2))
    if failed:
        print(f"logs in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
