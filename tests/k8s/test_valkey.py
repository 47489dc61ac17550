"""The Valkey of a run, started as its pod starts it: the configuration and the users' file are those of the chart."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.server import find_binary
from tests.k8s.manifests import combination, of_kind

ROLES = ("broker", "generator", "learner", "reader", "operator", "admin")


def files(folder: Path) -> Path:
    """The pod's files under `folder`, the paths in them moved there and the port replaced by a socket."""
    for name, text in of_kind(combination("minimal"), "ConfigMap", "-valkey")[0]["data"].items():
        for path in ("/run/valkey", "/data"):
            text = text.replace(path, f"{folder}{path}")
        text = text.replace("port 6379\n", f"port 0\nunixsocket {folder}/s\n")
        (folder / name).write_text(text)
    for path in ("run/valkey", "data", "secret"):
        (folder / path).mkdir(parents=True)
    for role in ROLES:
        (folder / "secret" / role).write_text(f"it's {role}'s $(secret) & 100% \\safe\n")
    return folder


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    script = ["sh", f"{folder}/users.sh", f"{folder}/users.acl", f"{folder}/secret", f"{folder}/run/valkey/users.acl"]
    return subprocess.Popen([*script, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = files(tmp_path_factory.mktemp("valkey"))
    process = start(folder, str(find_binary()), f"{folder}/valkey.conf")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ready to accept connections" in line:
            break
    else:
        pytest.fail("".join(lines))
    yield folder
    process.terminate()
    process.communicate(timeout=10)


def client(folder: Path, user: str | None, password: str | None) -> redis.Redis:
    # redis-py would try a refused password again.
    options = {"username": user, "password": password, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(unix_socket_path=f"{folder}/s", decode_responses=True, **options)


def test_each_role_gets_its_rights_and_no_more(server: Path) -> None:
    for role in ROLES:
        assert client(server, f"headrace-{role}", f"it's {role}'s $(secret) & 100% \\safe").ping()
    generator = client(server, "headrace-generator", "it's generator's $(secret) & 100% \\safe")
    assert generator.xadd("headrace:{my-run}:groups", {"group": "x"})
    for command in (
        ["xread", "STREAMS", "headrace:{my-run}:groups", "0"],
        ["xadd", "headrace:{other}:groups", "*", "a", "b"],
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            generator.execute_command(*command)
    admin = client(server, "headrace-admin", "it's admin's $(secret) & 100% \\safe")
    assert admin.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert admin.config_get("appendonly") == {"appendonly": "yes"}
    assert admin.config_get("maxmemory") == {"maxmemory": str(2048 << 20)}


def test_nobody_comes_in_without_a_password_and_the_probe_may_only_ping(server: Path) -> None:
    with pytest.raises(redis.exceptions.AuthenticationError):
        client(server, None, None).ping()
    with pytest.raises(redis.exceptions.AuthenticationError):
        client(server, "headrace-learner", "wrong").ping()
    probe = client(server, "headrace-probe", "probe")
    assert probe.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        probe.keys("*")


def test_users_file_holds_no_password(server: Path) -> None:
    text = (server / "run/valkey/users.acl").read_text()
    assert "secret" not in text
    assert (server / "run/valkey/users.acl").stat().st_mode & 0o077 == 0


def test_missing_password_is_named(tmp_path: Path) -> None:
    folder = files(tmp_path)
    (folder / "secret" / "learner").unlink()
    process = start(folder, "true")
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "no key 'learner'" in output
