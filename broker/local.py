"""`headrace up`: a whole fleet on one machine, as processes of this one.

Promises: members stop in order (generators, learner, broker, server), each within a deadline, whatever ended the run; a
member that fails is named with its exit code and the last lines of its log; no process survives, not even a launcher
that was killed (`broker.guard`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from broker.audit import equation
from broker.clients import PASSWORD_VARIABLE, URL_VARIABLE, USER_VARIABLE, Endpoint, endpoint
from broker.elastic import nodes_for
from broker.guard import SERVER, Guard
from broker.nodes import Nodes
from broker.pageguard import token_of, url_file
from broker.processes import MARK, Child, Command, Waiter, kill_family, mark, metrics_port, page_port
from broker.progress import MetricsTail, Progress
from broker.reading import REFRESH_S, Observer
from broker.server import Server
from broker.store import Broker
from common import environment
from common.config import Config
from common.errors import HeadraceError

TAIL_LINES = 15
# Seconds a member has to end by itself after SIGTERM; the learner writes a checkpoint in them.
GRACE_S = {"generator": 20.0, "learner": 120.0, "broker": 10.0}
LEAVE_S = 30.0  # generators, once they know that the run is over

# What torchrun adds after a rank has failed, and lines that say nothing: they would push the cause out of the tail.
_EPILOGUE = re.compile(r"elastic/multiprocessing/api\.py.*failed|torch/distributed/run\.py|ChildFailedError")
_NOISE = re.compile(r"^\s*$|\d+%\|.*\||it/s\]|s/it\]|closing signal SIG|^[\s=_-]+$")


class _Impatient(Exception):
    """A second signal: no more waiting."""


@dataclass(frozen=True)
class Outcome:
    """How the run ended: the exit code of `headrace up`, and a line for the user."""

    code: int
    text: str


def run_fleet(config: Config, generators: int, ranks: int | None, resume: bool) -> int:
    """Run a local fleet until the learner has done its last step, something fails, or a signal comes in.

    Args:
        config: the resolved run; its folder takes the configuration, logs, metrics and checkpoints.
        generators: generator processes.
        ranks: ranks of an elastic learner. None: as last wished for, else its least; any other has `learner.ranks`.
        resume: continue from the newest checkpoint.

    Returns:
        0: complete and the ledger balances; 1: something failed; 128 + n: stopped by signal n.
    """
    run = config.run.model_copy(update={"id": config.run.run_id})
    config = config.model_copy(update={"run": run})
    if ranks is not None and config.learner.elastic is not None:
        nodes_for(config, ranks)
    if config.page.enabled:
        token_of(config.page)
    path = environment.record_config(config)
    return Fleet(config, commands(config, path, generators, resume), ranks=ranks).run()


def commands(config: Config, path: Path, generators: int, resume: bool) -> list[Command]:
    """The members to start, in this order; `path` is the configuration they are given."""
    headrace = (str(Path(sys.executable).with_name("headrace")),)

    def environ(number: int, threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads), **metrics_port(config, number)}

    return [
        Command("broker", "broker", (*headrace, "broker", str(path)), {**environ(0, 1), **page_port(config)}),
        *(
            Command(
                name,
                "generator",
                (*headrace, "generator", str(path)),
                {**environ(number, config.generator.threads), "HEADRACE_GENERATOR_ID": name},
            )
            for number, name in ((index + 1, f"generator-{index}") for index in range(generators))
        ),
        Command(
            "learner",
            "learner",
            (*headrace, "learner", str(path), *(["--resume"] if resume else [])),
            environ(generators + 1, config.learner.threads),
        ),
    ]  # of an elastic learner that is every node's, but for the port


class Fleet:
    """The members of one run and the order in which they come and go."""

    def __init__(
        self, config: Config, commands: Sequence[Command], console: Console | None = None, ranks: int | None = None
    ) -> None:
        self.config, self.folder = config, config.run.folder
        self._commands = commands
        self._nodes = Nodes(config, ranks, commands) if config.learner.elastic is not None else None
        self._token = secrets.token_hex(8)
        self._logs = self.folder / "logs"
        self._children: list[Child] = []
        self._server: Server | None = None
        self._where = Endpoint("", None)
        generators = sum(command.role == "generator" for command in commands)
        self._progress = Progress(console or Console(), config.learner.max_steps, generators)

    def run(self) -> int:
        """Start everything, watch it, stop everything. Returns the exit code of `run_fleet`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with Waiter() as self._waiter, ExitStack() as stack:
            self._guard = Guard(self._token)
            stack.callback(self._guard.close)
            stack.callback(self._kill_all)
            self._start_server()
            self._observer = Observer(lambda: Broker.connect(self.config, self._where))
            with self._progress:
                outcome = self._run_members()
                self._observer.stop()
                outcome = self._audit(outcome)
            if self._server is not None:
                self._server.stop()
        self._progress.say(outcome.text, style="green" if outcome.code == 0 else "red")
        self._progress.say(f"everything lies in {self.folder}: config.yaml, logs/, metrics.jsonl, checkpoints/")
        return outcome.code

    # --- starting

    def _start_server(self) -> None:
        if self.config.broker.address is not None or os.environ.get(URL_VARIABLE):
            self._where = endpoint(self.config)
            return
        os.environ[MARK] = mark(self._token, SERVER)  # inherited by the server, for the guard
        try:
            self._server = Server(self.config.broker).start(self.folder)
        finally:
            del os.environ[MARK]
        self._where = Endpoint(self._server.url, self._server.password)
        assert self._server.process is not None
        self._waiter.watch(self._server.process.pid)

    def _start_members(self) -> None:
        url_file(self.config).unlink(missing_ok=True)
        for command in self._commands:
            if self._nodes is None or command.role != "learner":
                self._start(command)
        if self._nodes is not None:
            with closing(Broker.connect(self.config, self._where)) as broker:
                wished = self._nodes.first_wish(broker)
            for command in self._nodes.missing(wished):
                self._nodes.started(self._start(command))
        self._observer.start()
        self._page_said = False
        names = ", ".join(child.name for child in self._children)
        self._progress.say(f"run {self.config.run.run_id}: {names} started; logs in {self._logs}")

    def _start(self, command: Command) -> Child:
        where = {
            URL_VARIABLE: self._where.url,
            USER_VARIABLE: self._where.user or "",
            PASSWORD_VARIABLE: self._where.password or "",
        }
        command = Command(command.name, command.role, command.argv, {**where, **command.environ})
        child = Child(command, self._token, self._logs)
        self._children.append(child)
        self._guard.add(child.pid)
        self._waiter.watch(child.pid)
        return child

    def _of(self, role: str) -> list[Child]:
        return [child for child in self._children if child.role == role]

    # --- watching

    def _run_members(self) -> Outcome:
        try:
            self._start_members()
            outcome = self._watch()
            self._stop_members(complete=outcome.code == 0)
            return outcome
        except _Impatient:
            for child in self._children:
                child.kill()
            number = self._waiter.signals[-1]
            return Outcome(128 + number, f"killed at once by {number.name}; --resume starts from the last checkpoint")

    def _watch(self) -> Outcome:
        tail = MetricsTail(self.folder / "metrics.jsonl")
        while True:
            self._waiter.wait(REFRESH_S)
            self._progress.update(self._observer.latest, tail.read())
            self._say_page()
            if self._waiter.signals:
                number = self._waiter.signals[0]
                self._progress.say(f"{number.name}: stopping in order; once more to kill everything at once")
                return Outcome(128 + number, f"stopped by {number.name}; continue it with --resume")
            if (outcome := self._judge()) is not None:
                return outcome
            self._resize()

    def _say_page(self) -> None:
        """Once the broker service has a port for it, say where the page is."""
        file = url_file(self.config)
        if not self._page_said and file.exists() and (url := file.read_text(encoding="utf-8")):
            self._page_said = True
            self._progress.say(f"the run as a page: {url}")

    def _resize(self) -> None:
        """Start and dismiss nodes of an elastic learner until there are as many as wished for."""
        reading = self._observer.latest
        if self._nodes is None or reading is None:
            return
        for child in self._nodes.surplus(reading.wished_ranks):
            self._progress.say(f"{child.name} is dismissed: {reading.wished_ranks} ranks are wished for")
            child.terminate()
        for command in self._nodes.missing(reading.wished_ranks):
            self._progress.say(f"{command.name} is started: {reading.wished_ranks} ranks are wished for")
            self._nodes.started(self._start(command))

    def _judge(self) -> Outcome | None:
        """What the members that have ended mean for the run; None: it goes on."""
        if self._server is not None and self._server.process is not None and self._server.process.poll() is not None:
            return Outcome(1, f"the server ended, see {self.folder / 'redis' / 'server.log'}")
        for child in self._children:
            code = child.exit_code
            if code is None or child.gone:
                continue
            self._end(child)
            if code:
                self._report(child, code)
                replaced = self._nodes is not None and self._nodes.replaces(child, code, self._observer.latest)
                if child.role != "generator" and not replaced:
                    return Outcome(1, f"{child.name} failed, see {child.log}")
        learner = self._of("learner") if self._nodes is None else self._nodes.present
        if learner and all(child.exit_code == 0 for child in learner):
            if self._finished():
                return Outcome(0, "run complete")
            return Outcome(1, f"the learner ended before its last step, see {learner[0].log}")
        generators = self._of("generator")
        if generators and all(child.exit_code is not None for child in generators) and not self._finished():
            return Outcome(1, "no generator is left")
        return None

    def _finished(self) -> bool:
        try:
            broker = Broker.connect(self.config, self._where)
            try:
                return broker.finished()
            finally:
                broker.close()
        except HeadraceError as error:
            self._progress.say(str(error), style="red")
            return False

    def _report(self, child: Child, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        self._progress.say(f"{child.name} {how}; the end of {child.log}:", style="red")
        for line in meaningful_tail(child.output()):
            self._progress.say(f"  {line}")

    # --- stopping

    def _stop_members(self, complete: bool) -> None:
        """Generators, learner, broker. Raises _Impatient on a second signal."""
        if complete:
            self._wait(self._of("generator"), LEAVE_S)
        for role in ("generator", "learner", "broker"):
            members = self._of(role)
            for child in members:
                child.terminate()
            self._wait(members, GRACE_S[role])
            for child in members:
                if child.exit_code is None:
                    self._progress.say(f"{child.name} did not end within {GRACE_S[role]:.0f} s and is killed", "red")
                elif complete and child.exit_code > 0 and not child.gone:
                    self._report(child, child.exit_code)
                self._end(child)

    def _wait(self, members: Sequence[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(child.exit_code is None for child in members) and (left := deadline - time.monotonic()) > 0:
            self._waiter.wait(min(left, REFRESH_S))
            if len(self._waiter.signals) > 1:
                raise _Impatient

    def _end(self, child: Child) -> None:
        """What is left of a member goes now."""
        if not child.gone:
            child.kill()
            self._guard.remove(child.pid)

    def _kill_all(self) -> None:
        """The last thing, however the run ended."""
        for child in self._children:
            child.kill()
        if self._server is not None:
            self._server.stop()
        kill_family(mark(self._token), [])

    def _audit(self, outcome: Outcome) -> Outcome:
        """Print the ledger's equation and write `audit.json`; a ledger that does not balance fails the run."""
        try:
            broker = Broker.connect(self.config, self._where)
            ledger = broker.ledger()
            broker.close()
        except HeadraceError as error:
            self._progress.say(f"no audit: {error}", style="red")
            return outcome if outcome.code else Outcome(1, "the run's ledger cannot be read")
        record = {"run": self.config.run.run_id, **asdict(ledger), "balanced": ledger.balanced}
        (self.folder / "audit.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        self._progress.say(equation(ledger))
        return outcome if ledger.balanced or outcome.code else Outcome(1, "the ledger does not balance")


def meaningful_tail(output: str, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say what happened: without blank lines, progress bars and torchrun's epilogue."""
    kept: list[str] = []
    for line in output.replace("\r", "\n").splitlines():
        if kept and _EPILOGUE.search(line):
            break
        if not _NOISE.search(line):
            kept.append(line.rstrip())
    return kept[-lines:]
