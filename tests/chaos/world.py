"""One chaos run: a fleet, a supervisor that starts again what died, and somebody who kills it.

Everything random comes from the seed: who is killed, paused or cut off, in which order, and how far apart. Which
instruction it hits is up to the machine.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from broker import Broker, Server
from broker.clients import Endpoint
from common.config import BrokerConfig, Config
from learner import checkpoint
from tests.chaos.partition import SERVER_ADDRESS, Network
from tests.chaos.players import CRASHED
from tests.chaos.verdict import Verdict, judge, read_diary
from tests.chaos.watch import Watch
from tests.chaos.zygote import Zygote, exits

PAUSED = {"generator": 40, "learner": 35, "service": 15, "server": 10}
VICTIMS = {"generator": 45, "learner": 25, "service": 15, "server": 15}
LEASE_TTL_S = 1.0
LAST_VERSIONS = 6
PATIENCE_S = 60.0  # without a new checkpoint, or for the end
LEAVE_S = 1.5
PORT = 6379  # in a network namespace of our own


@dataclass(frozen=True)
class Plan:
    """One run. `power`: a killed server also loses up to a second of what it acknowledged, as at a power cut."""

    seed: int
    kills: int
    mean_gap_s: float = 0.15
    generators: int = 3
    fsync: str = "everysec"
    power: bool = False
    partitions: tuple[float, ...] = ()  # seconds that each of them lasts; needs a network

    @property
    def durability(self) -> str:
        return f"{self.fsync}, power" if self.power else self.fsync


@dataclass
class Result:
    plan: Plan
    folder: Path
    kills: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    cuts: int = 0
    partitions: list[str] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems


@dataclass
class Member:
    name: str
    role: str
    pid: int
    paused: bool = False


def configuration(plan: Plan, folder: Path, broker: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(f"config {plan.seed}")
    return {
        "run": {"name": "chaos", "id": "chaos", "dir": str(folder), "seed": plan.seed},
        "model": {"path": "none"},
        "prompts": {"type": "dataset", "path": "none"},
        "reward": {"type": "math_dapo"},
        "sampling": {"group_size": 2, "max_prompt_tokens": 8, "max_response_tokens": 16},
        "generator": {"prompts_in_flight": 4, "handoff_tokens": rng.choice([0, 1, 4])},
        "weights": {"backend": "gloo"},
        "broker": {"heartbeat_s": 0.1, "member_ttl_s": 0.5, "lease_ttl_s": LEASE_TTL_S, "max_attempts": 3, **broker},
        "staleness": {"max_staleness": rng.choice([1, 2, 3]), "expired_tokens": rng.choice(["mask", "drop"])},
        "learner": {
            "groups_per_step": rng.choice([3, 4, 6]),
            "checkpoint_every": rng.choice([2, 3, 5, 8]),
            "snapshot_every": rng.choice([1, 2, 3]),
            "settle_on": rng.choice(["snapshot", "snapshot", "checkpoint"]),
        },
    }


class World:
    """The fleet of one run and what happens to it."""

    def __init__(self, plan: Plan, folder: Path, zygote: Zygote, network: Network | None = None) -> None:
        """`zygote` starts what `network` has no host for."""
        self.plan, self.folder, self._network = plan, folder, network
        self._zygotes = dict.fromkeys(("generator", "learner", "service"), zygote)
        self._zygotes.update(network.zygotes if network is not None else {})
        self.result = Result(plan, folder)
        self._rng = random.Random(plan.seed)
        self._members: dict[str, Member] = {}
        self._zombies: list[Member] = []
        self._wakings: list[tuple[float, Member]] = []
        self._finishing = False
        self._server = Server(BrokerConfig(port=PORT if network is not None else None))

    def run(self) -> Result:
        started = time.monotonic()
        (self.folder / "logs").mkdir(parents=True)
        self._server.start(self.folder / "chaos")
        try:
            url = self._server.url if self._network is None else f"redis://{SERVER_ADDRESS}:{PORT}"
            where = {"url": url, "password_file": str(self._server.password_file)}
            self._tree = configuration(self.plan, self.folder, where)
            self.config = Config.model_validate(self._tree)
            self._here = Endpoint(self._server.url, self._server.password)
            self.broker = Broker.connect(self.config, self._here)
            self._set_up_server()
            self._live()
        except _Stuck as error:
            self._note(str(error))
        finally:
            self._kill_everything()
            self._server.stop()
            self.result.seconds = time.monotonic() - started
        return self.result

    def _live(self) -> None:
        watch = self._watch = Watch(Broker.connect(self.config, self._here), self.folder / "chaos" / "redis")
        watch.start()
        try:
            for name in ("service", "learner", *(f"generator-{index}" for index in range(self.plan.generators))):
                self._start(name)
            self._make_mischief()
            self._finish()
        finally:
            watch.end()
            self.result.samples = watch.samples
            self.result.problems.extend(watch.problems[:5])
        verdict = judge(self.broker, self.plan.seed, read_diary(self._diary), self.config.run.folder / "checkpoints")
        verdict.problems[:0] = self.result.problems
        self.result.verdict = verdict

    # --- members

    @property
    def _diary(self) -> Path:
        return self.folder / "learner.jsonl"

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        spec = {
            "config": self._tree,
            # While its disk is busy syncing, a server holds back writing for up to 2 s: a SIGKILL then loses that.
            "lossy": self.plan.fsync != "always",
            "median_s": 0.03,
            "train_s": 0.005,
            "target": str(self.folder / "target"),
            "diary": str(self._diary),
        }
        pid = self._zygotes[role].spawn(name, role, self.folder / "logs" / name, spec)
        self._members[name] = Member(name, role, pid)

    def _turn(self, timeout_s: float) -> None:
        """Start again what ended and wake up what slept long enough, for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            soonest = min([deadline, *(at for at, _ in self._wakings)])
            for end in exits(set(self._zygotes.values()), max(0.0, soonest - time.monotonic())):
                self._ended(end.pid, end.code)
            now = time.monotonic()
            for _, member in [each for each in self._wakings if each[0] <= now]:
                self._wake(member)
            if now >= deadline:
                return

    def _ended(self, pid: int, code: int) -> None:
        self._zombies = [zombie for zombie in self._zombies if zombie.pid != pid]
        self._wakings = [each for each in self._wakings if each[1].pid != pid]
        member = next((each for each in self._members.values() if each.pid == pid), None)
        if code == CRASHED:
            self._note(f"a process crashed, see {self.folder / 'logs'}: {self._last_words(pid, member)}")
        if member is None:
            return
        del self._members[member.name]
        if not (self._finishing and code == 0):
            self._start(member.name)

    def _last_words(self, pid: int, member: Member | None) -> str:
        name = member.name if member else "learner"
        lines = (self.folder / "logs" / name).read_text(errors="replace").splitlines()
        return f"{name} ({pid}): {lines[-1] if lines else ''}"

    def _note(self, problem: str) -> None:
        self.result.problems.append(problem)

    def _wake(self, member: Member) -> None:
        self._wakings = [each for each in self._wakings if each[1] is not member]
        member.paused = False
        os.kill(member.pid, signal.SIGCONT)

    # --- mischief

    def _make_mischief(self) -> None:
        plan, rng = self.plan, self._rng
        victims = rng.choices(list(VICTIMS), list(VICTIMS.values()), k=plan.kills)
        acts: list[Callable[[], None]] = [partial(self._kill, victim) for victim in victims]
        acts += [self._pause] * max(1, plan.kills // 8) + [self._cut_connections] * max(1, plan.kills // 8)
        acts += [self._dismiss] * (plan.kills // 16)
        acts += [partial(self._partition, seconds) for seconds in plan.partitions]
        rng.shuffle(acts)
        for number, act in enumerate(acts):
            self._turn(rng.expovariate(1 / plan.mean_gap_s))
            act()
            if number % 8 == 7:
                self._await_progress()
        self._await_progress()

    def _await_progress(self) -> None:
        """Whatever was done to it, the run goes on: wait for the next durable checkpoint."""
        before, deadline = self._newest(), time.monotonic() + PATIENCE_S
        while self._newest() == before:
            self._turn(0.02)
            if time.monotonic() > deadline:
                raise _Stuck(f"no checkpoint for {PATIENCE_S:.0f} s: {self.broker.ledger()} {self.broker.queues()}")

    def _newest(self) -> list[tuple[int, int, Path]]:
        """The newest checkpoint or snapshot, if there is one."""
        return checkpoint.ages(*self.config.save_folders)[-1:]

    def _kill(self, victim: str) -> None:
        if victim == "server":
            self._kill_server()
        else:
            member = self._one_of(victim)
            os.kill(member.pid, signal.SIGKILL)
            self._until(lambda: self._members.get(member.name) is not member, PATIENCE_S)
        self.result.kills[victim] += 1

    def _kill_server(self) -> None:
        process = self._server.process
        assert process is not None
        process.kill()
        process.wait()
        if self.plan.power and (cut := self._watch.unsynced_cut(self._rng)):
            path, _, left = cut
            os.truncate(path, left)
        self._server.stop()
        self._server.start(self.folder / "chaos")
        self._set_up_server()

    def _set_up_server(self) -> None:
        self.broker._call(lambda: self.broker._client.config_set("appendfsync", self.plan.fsync))
        if self._network is not None:
            self.broker._call(lambda: self.broker._client.config_set("bind", f"127.0.0.1 {SERVER_ADDRESS}"))

    def _pause(self) -> None:
        """Stop one for longer than its leases live. A learner or service is replaced meanwhile, and wakes up fenced."""
        self.result.pauses += 1
        role = self._rng.choices(list(PAUSED), list(PAUSED.values()))[0]
        if role == "server":
            self._pause_server()
            return
        self._turn(0.0)  # not one that has just died
        member = self._one_of(role)
        try:
            os.kill(member.pid, signal.SIGSTOP)
        except ProcessLookupError:  # it has just ended by itself
            return
        member.paused = True
        self._wakings.append((time.monotonic() + LEASE_TTL_S * self._rng.uniform(1.2, 2.0), member))
        if member.role != "generator":
            self._zombies.append(member)
            self._start(member.name)

    def _pause_server(self) -> None:
        assert self._server.process is not None
        os.kill(self._server.process.pid, signal.SIGSTOP)
        self._turn(self._rng.uniform(0.2, 0.8))
        os.kill(self._server.process.pid, signal.SIGCONT)

    def _one_of(self, role: str) -> Member:
        """A member that runs; where all of the role are paused, the first to wake up."""
        while not (choice := [m for m in self._members.values() if m.role == role and not m.paused]):
            self._turn(0.05)
        return self._rng.choice(choice)

    def _cut_connections(self) -> None:
        self.broker._call(lambda: self.broker._client.execute_command("CLIENT", "KILL", "TYPE", "normal"))
        self.result.cuts += 1

    def _partition(self, seconds: float) -> None:
        """Generators or learner lose the server for longer than their leases and their membership live."""
        assert self._network is not None
        host = self._rng.choice(list(self._network.zygotes))
        self._network.cut(host)
        self._turn(seconds)
        self._network.heal(host)
        self.result.partitions.append(f"{host} {seconds:.0f} s")
        self._await_progress()

    def _dismiss(self) -> None:
        """A generator is told to leave: it gives back what it has not finished."""
        os.kill(self._one_of("generator").pid, signal.SIGTERM)

    # --- the end

    def _finish(self) -> None:
        """Nothing more is killed; some versions later the learner finishes and all leave."""
        while self._wakings:
            self._turn(0.05)
        target = self.broker.version() + LAST_VERSIONS
        temporary = self.folder / "target.new"
        temporary.write_text(str(target))
        temporary.rename(self.folder / "target")
        self._finishing = True
        self._await(lambda: "learner" not in self._members, PATIENCE_S, "the learner did not reach its last version")
        if not self.broker.finished():
            self._note("the learner has left, but the run is not finished")
        self._until(lambda: not self._members, LEAVE_S)
        for member in self._members.values():  # joined after the word had gone round
            os.kill(member.pid, signal.SIGTERM)
        self._await(lambda: not self._members and not self._zombies, PATIENCE_S, "a process did not leave")

    def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            self._turn(0.02)
        return True

    def _await(self, holds: Callable[[], bool], seconds: float, problem: str) -> None:
        if not self._until(holds, seconds):
            names = [member.name for member in (*self._members.values(), *self._zombies)]
            raise _Stuck(f"{problem} within {seconds:.0f} s; still there: {names}; {self.broker.ledger()}")

    def _kill_everything(self) -> None:
        for member in (*self._members.values(), *self._zombies):
            try:
                os.kill(member.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        exits(set(self._zygotes.values()), 1.0)


class _Stuck(Exception):
    """The run does not go on."""

