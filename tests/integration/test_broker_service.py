"""The broker's processes: the server of one's own, the feeder and reclaimer, and the commands that read a run."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from broker_helpers import MakeConfig, group, ids, release, submit
from typer.testing import CliRunner
from valkey_helpers import until

from broker import Broker, Server, checks
from broker.runs import existing_run, newest_run_id
from broker.service import run_service
from common.cli import app
from common.config import BrokerConfig, Config
from common.errors import ConfigError

HEADRACE = Path(sys.executable).with_name("headrace")


@pytest.fixture(autouse=True)
def _no_server_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    monkeypatch.delenv("HEADRACE_REDIS_PASSWORD", raising=False)


def _own_server(config: Config) -> Config:
    """`config` without a URL: the server is in the run's folder."""
    return config.model_copy(update={"broker": BrokerConfig(maxmemory_mb=64)})


# -- server


def test_server_started_again_has_every_write(make_config: MakeConfig) -> None:
    config = _own_server(make_config())
    with Server(config.broker).start(config.run.folder):
        broker = Broker.connect(config)  # finds the server in the run's folder
        submit(broker, 3)
        broker.close()
    with pytest.raises(ConfigError):
        Broker.connect(config)
    with Server(config.broker).start(config.run.folder):
        broker = Broker.connect(config)
        assert broker.ledger().submitted == 3
        assert len(ids(broker.take(broker.begin(0, []), 9, 0))) == 3
        broker.close()


def test_server_killed_loses_nothing_and_calls_go_on(make_config: MakeConfig) -> None:
    config = _own_server(make_config())
    server = Server(config.broker).start(config.run.folder)
    broker = Broker.connect(config)
    submit(broker, 2)
    # While a slow disk syncs, the server holds back what it writes next for up to 2 s (appendfsync everysec).
    until(lambda: not broker._client.info("persistence")["aof_buffer_length"])
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(broker.ledger().submitted))
    caller.start()
    server.stop()
    with server.start(config.run.folder):
        caller.join(20)
        assert answers == [2]
        broker.close()


def test_server_left_by_a_killed_launcher_is_replaced(make_config: MakeConfig) -> None:
    config = _own_server(make_config())
    script = (
        "import os, sys, pathlib; from broker import Server; "
        "s = Server().start(pathlib.Path(sys.argv[1])); print(s.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    launcher = subprocess.run([sys.executable, "-c", script, config.run.folder], capture_output=True, check=False)
    orphan = int(launcher.stdout)
    release_broker = Broker.connect(config)
    release(release_broker, 4)
    release_broker.close()
    with Server(config.broker).start(config.run.folder) as server:
        assert server.process is not None and server.process.pid != orphan
        broker = Broker.connect(config)
        assert broker.ledger().released == 4
        broker.close()
    state = Path(f"/proc/{orphan}/stat")  # gone, or a zombie of whoever adopted it
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_server_of_a_live_run_is_not_touched(make_config: MakeConfig) -> None:
    config = _own_server(make_config())
    with Server(config.broker).start(config.run.folder):
        with pytest.raises(ConfigError, match="this run is live"):
            Server(config.broker).start(config.run.folder)
        Broker.connect(config).close()


def test_server_in_a_deep_folder_with_odd_characters_starts(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = tmp_path / ("deep " * 20) / 'quo"te'
    with Server().start(folder) as server:
        assert len(server.url) < 108 + len("unix://")
        socket_folder = Path(server.url.removeprefix("unix://")).parent
        assert socket_folder.exists()
    assert not socket_folder.exists()


def test_server_password_is_private_and_not_on_the_command_line(valkey: Server) -> None:
    assert stat.S_IMODE(valkey.password_file.stat().st_mode) == 0o600
    assert stat.S_IMODE((valkey.password_file.parent / "server.conf").stat().st_mode) == 0o600
    assert valkey.process is not None
    assert valkey.password.encode() not in Path(f"/proc/{valkey.process.pid}/cmdline").read_bytes()


def test_server_keeps_the_environment_it_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard recognises the processes of a fleet by it, after their launcher was killed."""
    monkeypatch.setenv("HEADRACE_TEST_MARK", "seen")
    with Server().start(tmp_path) as server:
        assert server.process is not None
        assert b"HEADRACE_TEST_MARK=seen" in Path(f"/proc/{server.process.pid}/environ").read_bytes()


def test_server_on_a_port_in_use_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"broker\.port: cannot listen on 127\.0\.0\.1:{port}"):
            Server(BrokerConfig(port=port)).start(tmp_path)
    with Server(BrokerConfig(port=port)).start(tmp_path) as server, socket.create_connection(("127.0.0.1", port)):
        assert server.process is not None


# -- service


def _service(config: Config) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=run_service, args=(config, stop), daemon=True)
    thread.start()
    return thread, stop


def test_service_feeds_to_the_budget_and_no_further(make_config: MakeConfig, tiny_model: Path) -> None:
    config = make_config(model={"path": str(tiny_model)}, staleness={"max_staleness": 1})
    assert config.max_outstanding == 8
    broker = Broker.connect(config)
    thread, stop = _service(config)
    seen: list[str] = []
    version = 0
    epoch = broker.begin(0, [])
    while version < 5:
        assert broker.ledger().outstanding <= 8
        for lease in broker.lease("g1", 4, 5000):
            seen.append(lease.prompt.group_id)
            if len(seen) % 2:
                broker.filtered("g1", lease.entry_id, "wrong")
            else:
                broker.submit("g1", lease, group(lease.prompt.group_id))
        taken = broker.take(epoch, 4, 0)
        if taken:
            version += 1
            broker.step(epoch, version, taken)
            broker.settle(epoch, ids(taken))
    assert [member.role for member in broker.members("broker")] == ["broker"]
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    # In order, each once, and the budget stays full: half of the groups were filtered and nothing leaked.
    assert seen == [f"{position:09d}" for position in range(len(seen))]
    assert broker.ledger().balanced
    assert broker.members("broker") == []
    broker.close()


def test_service_ends_when_the_run_is_finished_but_not_on_an_old_finish(
    make_config: MakeConfig, tiny_model: Path
) -> None:
    config = make_config(model={"path": str(tiny_model)}, broker={"heartbeat_s": 0.02})
    broker = Broker.connect(config)
    broker.finish()  # of the run that is being resumed
    thread, stop = _service(config)
    broker.lease("g1", 1, 5000)
    while not broker.members("broker"):
        broker.wait_event("$", 20)
    assert thread.is_alive()
    broker.begin(3, [])
    thread.join(0.2)
    assert thread.is_alive()
    broker.finish()
    thread.join(10)
    assert not thread.is_alive()
    stop.set()
    broker.close()


def test_broker_command_on_sigterm_ends_cleanly(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(model={"path": str(tiny_model)})
    broker = Broker.connect(config)
    service = subprocess.Popen(
        [HEADRACE, "broker", _write(config, tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seen = ""
    for _ in range(30):
        if leases := broker.lease("g1", 1, 5000):
            seen = leases[0].prompt.group_id
            break
    service.send_signal(signal.SIGTERM)
    _, log = service.communicate(timeout=20)
    assert (service.returncode, seen) == (0, "000000000"), log
    assert "broker stops" in log
    assert broker.members("broker") == []
    broker.close()


# -- commands


def _write(config: Config, tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(path)


def test_audit_of_a_live_run_prints_the_equation_and_fails_where_it_does_not_hold(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    broker = Broker.connect(config)
    submit(broker, 3)
    path = _write(config, tmp_path)
    result = CliRunner().invoke(app, ["audit", path])
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "balanced")
    assert "+ outstanding                       3" in result.output
    assert "oldest outstanding group: 000000000, " in result.output
    broker._client.hincrby(broker.keys.ledger, "released", 1)
    result = CliRunner().invoke(app, ["audit", path])
    assert result.exit_code == 1
    assert "released is 4, the terms sum to 3" in result.output

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    result = CliRunner().invoke(app, ["audit", path, "--watch"])
    assert result.exit_code == 1
    assert "released is 4, the terms sum to 3" in result.output
    broker.close()


def test_audit_of_a_finished_run_starts_its_server_and_leaves_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    config = _own_server(make_config(run={"name": "over", "id": "over-20260102-030405"}))
    with Server(config.broker).start(config.run.folder):
        broker = Broker.connect(config)
        submit(broker, 2)
        broker.close()
    named = config.model_copy(update={"run": config.run.model_copy(update={"id": None})})
    result = CliRunner().invoke(app, ["audit", _write(named, tmp_path)])
    assert result.exit_code == 0
    assert "over-20260102-030405" in result.output
    assert not (config.run.folder / "redis" / "url").exists()


def test_status_shows_queues_members_and_dead_letters(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(broker={"max_attempts": 1})
    broker = Broker.connect(config)
    release(broker, 3)
    lease, _ = broker.lease("g1", 2, 0)
    broker.fail("g1", lease.entry_id, lease.prompt, "the reward raised")
    result = CliRunner().invoke(app, ["status", _write(config, tmp_path)])
    assert result.exit_code == 0
    for expected in ("1 waiting, 1 leased", "000000000: the reward raised", "balanced"):
        assert expected in result.output
    broker.close()


def test_newest_run_id_ignores_runs_of_longer_names(make_config: MakeConfig) -> None:
    config = make_config(run={"name": "quick", "id": None})
    for name in ("quick-20260101-000000", "quick-large-20270101-000000"):
        (config.run.dir / name).mkdir(parents=True)
    assert newest_run_id(config.run) == "quick-20260101-000000"
    assert existing_run(_own_server(config), "quick-other").run.run_id == "quick-other"


def test_newest_run_is_the_one_that_was_begun_last_not_the_one_that_ended_last(make_config: MakeConfig) -> None:
    config = make_config(run={"name": "quick", "id": None})
    for age_s, name in ((100, "quick-20260101-000000"), (10, "quick-20260102-000000")):
        (config.run.dir / name).mkdir(parents=True)
        (config.run.dir / name / "config.yaml").touch()
        os.utime(config.run.dir / name / "config.yaml", (time.time() - age_s,) * 2)
    (config.run.dir / "quick-20260101-000000" / "audit.json").touch()
    assert newest_run_id(config.run) == "quick-20260102-000000"


def test_existing_run_without_any_says_where_it_looked_and_what_is_there(make_config: MakeConfig) -> None:
    config = _own_server(make_config(run={"name": "none", "id": None}))
    with pytest.raises(ConfigError, match=r"no run named 'none'.*--run-id$"):
        existing_run(config, None)
    (config.run.dir / "another").mkdir(parents=True)
    (config.run.dir / "another" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"no run named 'none'.*--run-id; the newest there: another$"):
        existing_run(config, None)


def test_up_of_an_existing_run_without_resume_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    config.run.folder.mkdir(parents=True)
    result = CliRunner().invoke(app, ["up", _write(config, tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "continue it with --resume" in str(result.exception)


def test_up_resuming_a_run_that_is_not_there_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", _write(make_config(), tmp_path), "--resume"])
    assert "no such run to resume" in str(result.exception)


# -- checks


def test_check_with_a_port_in_use_stops_at_once(make_config: MakeConfig, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = make_config(model={"path": str(tiny_model)}, broker={"url": None, "password_file": None, "port": port})
        with pytest.raises(ConfigError, match=str(port)):
            checks.check(config)
    checks.check(config)


def test_check_with_a_server_that_is_not_there_stops_at_once(make_config: MakeConfig, tiny_model: Path) -> None:
    checks.check(make_config(model={"path": str(tiny_model)}))
    with pytest.raises(ConfigError, match="no Redis or Valkey server answers"):
        checks.check(make_config(model={"path": str(tiny_model)}, broker={"url": "unix:///nowhere"}))
