"""`headrace up`: the order of stopping, failures shown, and no process left, with small stand-ins as members and a real
server."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from broker import Broker
from broker.clients import Endpoint
from broker.local import Fleet, commands, meaningful_tail
from broker.nodes import Nodes
from broker.processes import Command, await_end, kill_family
from broker.progress import MetricsTail
from broker.server import read_endpoint
from common.config import Config

DRIVER = Path(__file__).with_name("fleet_driver.py")
TRACE = "FLEET_TEST"  # environment variable by which every process of a test is found
# Opening a FIFO waits for the other side: the test knows without polling that a member is up.
PRELUDE = f"""
import os, signal, subprocess, sys, time
name, folder = sys.argv[1:3]
def note(text):
    with open(folder + "/notes", "a") as file:
        file.write(name + " " + text + "\\n")
def up():
    with open(folder + "/ready-" + name, "w") as file:
        file.write(str(os.getpid()))
assert {TRACE!r} in os.environ
"""
PATIENT = """
def leave(*_):
    note("stops")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
up()
while True:
    signal.pause()
"""
STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: note("ignores"))
# As vLLM and torchrun do: a child in a session of its own, and one that has lost its mark.
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sleep", "1001"], env={"FLEET_TEST": os.environ["FLEET_TEST"]})
up()
while True:
    signal.pause()
"""


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    value = uuid.uuid4().hex
    monkeypatch.setenv(TRACE, value)
    yield value
    for pid in _traced(value):
        os.kill(pid, signal.SIGKILL)


def _traced(value: str) -> list[int]:
    """Living processes of the test, this one not included."""
    found, wanted = [], f"{TRACE}={value}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            traced = wanted in (path / "environ").read_bytes().split(b"\0")
            alive = (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if traced and alive and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def _member(name: str, folder: Path, script: str) -> Command:
    ready = folder / f"ready-{name}"
    if not ready.exists():
        os.mkfifo(ready)
    argv = (sys.executable, "-S", "-c", PRELUDE + script, name, str(folder))
    return Command(name, name.split("-")[0], argv, {})


def _all(folder: Path, script: str) -> list[Command]:
    return [_member(name, folder, script) for name in ("broker", "generator-0", "generator-1", "learner")]


def _pids(folder: Path, members: list[Command]) -> list[int]:
    """Waits until every member is up."""
    return [int((folder / f"ready-{member.name}").read_text()) for member in members]


def _notes(folder: Path, text: str) -> list[str]:
    lines = (folder / "notes").read_text().splitlines()
    return [line.split()[0] for line in lines if line.endswith(text)]


@pytest.fixture
def start(
    make_config: Callable[..., Config], tmp_path: Path, trace: str
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a launcher with a server of its own, in a process that can be signalled."""
    running: list[subprocess.Popen[str]] = []

    def launch(members: list[Command], **sections: dict[str, object]) -> subprocess.Popen[str]:
        config = make_config(broker={"url": None, "password_file": None}, **sections)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        listed = [{"name": each.name, "role": each.role, "argv": each.argv} for each in members]
        (tmp_path / "members.json").write_text(json.dumps(listed))
        running.append(
            subprocess.Popen(
                [sys.executable, DRIVER, tmp_path / "config.yaml", tmp_path / "members.json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield launch
    for process in running:
        with process:
            process.kill()


NODE = """
def leave(*_):
    note("stops")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
note(f"began {os.getpid()}")
while True:
    signal.pause()
"""


def test_learner_of_nodes_follows_the_wish_and_a_killed_node_is_replaced(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, trace: str
) -> None:
    members = [_member("broker", tmp_path, PATIENT), _member("learner", tmp_path, NODE)]
    launcher = start(members, learner={"elastic": {"min_nodes": 2, "max_nodes": 4}})
    _pids(tmp_path, members[:1])

    def await_notes(text: str, count: int) -> list[str]:
        deadline = time.monotonic() + 60
        while len(found := re.findall(rf"learner {text} ?(\d*)", (tmp_path / "notes").read_text())) < count:
            assert time.monotonic() < deadline and launcher.poll() is None, found
            time.sleep(0.05)
        return found

    (tmp_path / "notes").touch()
    await_notes("began", 2)
    (folder,) = (tmp_path / "runs").iterdir()
    config = Config.model_validate(yaml.safe_load((tmp_path / "config.yaml").read_text()))
    broker = Broker.connect(config, Endpoint(*read_endpoint(folder)))
    assert broker.wished_ranks() == 2, "at first the least that one would accept"
    broker.resize(4)
    pids = await_notes("began", 4)
    os.kill(int(pids[0]), signal.SIGKILL)
    assert len(set(await_notes("began", 5))) == 5
    broker.resize(2)
    await_notes("stops", 2)
    broker.close()
    launcher.terminate()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM and "was killed by SIGKILL" in output, output
    assert _notes(tmp_path, "stops") == ["learner"] * 4 + ["broker"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_members_in_order_and_leaves_nothing(
    start: Callable[[list[Command]], subprocess.Popen[str]], tmp_path: Path, trace: str, number: signal.Signals
) -> None:
    members = _all(tmp_path, PATIENT)
    launcher = start(members)
    _pids(tmp_path, members)
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_endpoint(folder)[0].startswith("unix://"), "the server runs"
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number, output
    stopped = _notes(tmp_path, "stops")
    assert sorted(stopped[:2]) == ["generator-0", "generator-1"] and stopped[2:] == ["learner", "broker"]
    assert f"stopped by {number.name}" in output and str(folder) in output
    assert json.loads((folder / "audit.json").read_text())["balanced"] is True
    assert not (folder / "redis" / "url").exists(), "the server was stopped"
    assert _traced(trace) == []


def test_second_interrupt_kills_stubborn_members_and_their_children_at_once(
    start: Callable[[list[Command]], subprocess.Popen[str]], tmp_path: Path, trace: str
) -> None:
    members = _all(tmp_path, STUBBORN)
    launcher = start(members)
    pids = _pids(tmp_path, members)
    assert len(_traced(trace)) >= 3 * len(members)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout is not None
    while "stopping in order" not in launcher.stdout.readline():
        pass
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=15)
    assert launcher.returncode == 130 and "killed at once by SIGINT" in output
    assert await_end(pids, 1.0)
    assert _traced(trace) == []


def test_killed_launcher_takes_every_process_with_it(
    start: Callable[[list[Command]], subprocess.Popen[str]], tmp_path: Path, trace: str
) -> None:
    members = [_member("broker", tmp_path, PATIENT), _member("learner", tmp_path, STUBBORN)]
    launcher = start(members)
    _pids(tmp_path, members)
    everyone = _traced(trace)
    launcher.kill()
    launcher.wait()
    assert await_end(everyone, 30.0), "members, their children, the server and the guard itself"
    assert _notes(tmp_path, "stops") == ["broker"], "those that can were asked first"
    assert _traced(trace) == []


# --- outcomes, in this process


class _Shown:
    def __init__(self, config: Config, members: list[Command]) -> None:
        self._stream = io.StringIO()
        self.fleet = Fleet(config, members, Console(file=self._stream, width=500))

    def run(self) -> tuple[int, str]:
        return self.fleet.run(), self._stream.getvalue()


def test_failed_learner_shows_the_end_of_its_log_and_stops_the_rest(
    make_config: Callable[..., Config], tmp_path: Path, trace: str
) -> None:
    config = make_config()
    failing = "print('old'); [print('line', n) for n in range(30)]; print(); print('KeyError: the cause'); sys.exit(3)"
    members = [_member("broker", tmp_path, "note('stops')"), _member("learner", tmp_path, failing)]
    members.insert(1, _member("generator-0", tmp_path, PATIENT.replace("up()", "")))
    code, shown = _Shown(config, members).run()
    log = config.run.folder / "logs" / "learner.log"
    assert code == 1
    assert f"learner failed with exit code 3; the end of {log}:" in shown
    assert "KeyError: the cause" in shown and "line 16" in shown and "line 15\n" not in shown and "old" not in shown
    assert log.read_text().startswith("old\nline 0\n")
    assert _traced(trace) == []


def test_lost_generator_is_a_warning_while_another_lives_and_an_end_when_none_does(
    make_config: Callable[..., Config], tmp_path: Path, trace: str
) -> None:
    dying = "os.kill(os.getpid(), signal.SIGSEGV)"
    waits_for_the_first = "open(folder + '/go').read(); sys.exit(4)"
    os.mkfifo(tmp_path / "go")
    members = [
        _member("generator-0", tmp_path, dying),
        _member("generator-1", tmp_path, waits_for_the_first),
        _member("learner", tmp_path, PATIENT.replace("up()", "open(folder + '/go', 'w').close()")),
    ]
    code, shown = _Shown(make_config(), members).run()
    assert code == 1
    assert "generator-0 was killed by SIGSEGV" in shown and "generator-1 failed with exit code 4" in shown
    assert shown.index("generator-0 was") < shown.index("no generator is left")
    assert _notes(tmp_path, "stops") == ["learner"]


def test_complete_run_waits_for_generators_prints_the_audit_and_returns_zero(
    make_config: Callable[..., Config], tmp_path: Path, trace: str
) -> None:
    config = make_config()
    broker = Broker.connect(config)
    broker.finish()
    broker.close()
    leaves_by_itself = "open(folder + '/end').read(); note('left'); sys.exit(0)"
    os.mkfifo(tmp_path / "end")
    steps = "".join(json.dumps({"step": n, "version": n, "reward_mean": 0.5}) + "\\n" for n in (1, 2))
    writes = f"open({str(config.run.folder / 'metrics.jsonl')!r}, 'a').write('{steps}')"
    members = [
        _member("broker", tmp_path, PATIENT.replace("up()", "")),
        _member("generator-0", tmp_path, leaves_by_itself),
        _member("learner", tmp_path, f"{writes}; open(folder + '/end', 'w').close()"),
    ]
    code, shown = _Shown(config, members).run()
    assert code == 0, shown
    assert _notes(tmp_path, "left") == ["generator-0"] and _notes(tmp_path, "stops") == ["broker"]
    assert re.search(r"step 2/10\s+version 2\s+reward 0\.500", shown)
    assert re.search(r"released +0", shown) and "balanced" in shown and "run complete" in shown
    assert json.loads((config.run.folder / "audit.json").read_text())["released"] == 0


def test_learner_that_ends_early_without_error_is_no_success(
    make_config: Callable[..., Config], tmp_path: Path, trace: str
) -> None:
    code, shown = _Shown(make_config(), [_member("learner", tmp_path, "")]).run()
    assert code == 1 and "the learner ended before its last step" in shown


def test_members_do_not_see_override_variables_a_second_time(
    make_config: Callable[..., Config], tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE__LEARNER__MAX_STEPS", "3")
    script = "note(str('HEADRACE__LEARNER__MAX_STEPS' in os.environ) + ' ' + os.environ['HEADRACE_REDIS_URL'])"
    config = make_config()
    _Shown(config, [_member("learner", tmp_path, script)]).run()
    assert (tmp_path / "notes").read_text() == f"learner False {config.broker.url}\n"


def test_commands_name_every_member_and_pass_resume_to_the_learner_only(make_config: Callable[..., Config]) -> None:
    made = commands(make_config(), Path("c.yaml"), 2, resume=True)
    assert [command.name for command in made] == ["broker", "generator-0", "generator-1", "learner"]
    assert [command.argv[1:] for command in made] == [
        ("broker", "c.yaml"), ("generator", "c.yaml"), ("generator", "c.yaml"), ("learner", "c.yaml", "--resume"),
    ]  # fmt: skip
    assert made[2].environ["HEADRACE_GENERATOR_ID"] == "generator-1"
    assert Path(made[0].argv[0]).is_file()
    assert not any("HEADRACE__METRICS__PORT" in command.environ for command in made)


def test_every_member_has_a_metrics_port_of_its_own(make_config: Callable[..., Config]) -> None:
    config = make_config(metrics={"port": 9400}, learner={"elastic": {"min_nodes": 1, "max_nodes": 3}})
    made = commands(config, Path("c.yaml"), 2, resume=False)
    ports = [command.environ["HEADRACE__METRICS__PORT"] for command in made]
    assert ports == ["9400", "9401", "9402", "9403"]
    nodes = Nodes(config, None, made).missing(2)
    assert [node.environ["HEADRACE__METRICS__PORT"] for node in nodes] == ["9403", "9404"]


def test_meaningful_tail_leaves_out_noise_and_torchruns_epilogue() -> None:
    log = (
        "Loading:  50%|#####     | 1/2 [00:00<00:00, 3.1it/s]\rdone\n\n=====\n"
        "Traceback (most recent call last):\n  File x\nValueError: cause\n"
        "W1129 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 7 closing signal SIGTERM\n"
        "E1129 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0\n"
        "Traceback (most recent call last):\n  File torchrun\nChildFailedError:\n"
    )
    assert meaningful_tail(log, 3) == ["Traceback (most recent call last):", "  File x", "ValueError: cause"]


def test_metrics_tail_gives_new_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    tail = MetricsTail(path)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
        file.flush()
        assert tail.read() == [{"step": 2}]
        file.write('ep": 3}\n')
        file.flush()
        assert tail.read() == [{"step": 3}] and tail.read() == []


def test_kill_family_spares_members_whose_name_only_begins_alike() -> None:
    token = uuid.uuid4().hex
    ones = [
        subprocess.Popen(["sleep", "100"], env={"PATH": os.environ["PATH"], "HEADRACE_MEMBER": f"{token}/{name}/"})
        for name in ("generator-1", "generator-10")
    ]
    try:
        kill_family(f"{token}/generator-1/", [])
        assert ones[0].wait(5) == -signal.SIGKILL and ones[1].poll() is None
    finally:
        for process in ones:
            process.kill()
            process.wait()
