"""The broker on servers of other people's: Sentinel with a failover, Cluster, TLS with client certificates."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from broker_helpers import MakeConfig, group, ids, lease, release, submit
from valkey_helpers import DATA, Node, free_port, node, tls_front, until

from broker import Broker, Member
from broker.acl import rules
from common.config import Config
from common.errors import ConfigError

On = Callable[..., Config]


@pytest.fixture(autouse=True)
def _nothing_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "USER", "PASSWORD"):
        monkeypatch.delenv(f"HEADRACE_REDIS_{name}", raising=False)


def flow(broker: Broker) -> None:
    """Every way a prompt goes, once: released, leased, filtered, submitted, taken back, taken, expired, settled."""
    before = broker.ledger()
    broker.heartbeat(Member("g1", "generator", "serving"))
    assert "g1" in [each.id for each in broker.members()]
    release(broker, 4)
    leases = lease(broker, 4)
    assert broker.renew("g1", [leases[0].entry_id]) == [leases[0].entry_id]
    for each in leases[:2]:
        assert broker.submit("g1", each, group(each.prompt.group_id))
    assert broker.filtered("g1", leases[2].entry_id, "wrong")
    broker.leave("g1")
    while not broker.reclaim():
        pass
    broker.announce({"type": "weights"})
    assert broker.controls("0", 0)[-1][1] == {"type": "weights"}
    epoch = broker.begin(0, [])
    first, second = broker.take(epoch, 2, 0)
    broker.expire(epoch, [first])
    broker.step(epoch, 1, [second])
    assert broker.settle(epoch, [second.group.group_id]) == 1
    assert broker.evaluation().open is None
    assert broker.queues().prompts_waiting == 2, "the lease that was taken back, and the prompt of what expired"
    for last in lease(broker, 2, "g2"):
        assert broker.filtered("g2", last.entry_id, "equal")
    broker.finish()
    assert broker.finished()
    ledger = broker.ledger()
    assert ledger.balanced and ledger.released == before.released + 5 and ledger.outstanding == 0


@pytest.fixture
def on(make_config: MakeConfig) -> On:
    """`on(url=..., ...)`: a configuration whose server is this one."""

    def make(**options: object) -> Config:
        return make_config(broker={"url": None, "password_file": None, "lease_ttl_s": 0.02, **options})

    return make


# -- Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A cluster of one node, which takes 2 s to trust itself after each start."""
    with node(tmp_path_factory.mktemp("cluster") / "n", *DATA, "--cluster-enabled", "yes") as member:
        member.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in member.admin.execute_command("CLUSTER", "INFO"))
        yield member


def test_cluster_serves_the_whole_flow_and_a_restart(cluster: Node, on: On) -> None:
    with pytest.raises(ConfigError, match=r"set broker\.cluster to true"):
        Broker.connect(on(url=cluster.url))
    broker = Broker.connect(on(url=cluster.url, cluster=True, max_bytes=10_000_000))
    flow(broker)
    cluster.kill()
    cluster.start()
    flow(broker)
    broker.close()


def test_cluster_user_of_a_generator_may_ask_where_the_slots_are(
    cluster: Node, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on(url=cluster.url, cluster=True, max_bytes=10_000_000)
    words = rules(config.run.run_id, "generator", cluster=True)
    cluster.admin.execute_command("ACL", "SETUSER", "g", *words, "on", ">secret")
    monkeypatch.setenv("HEADRACE_REDIS_USER", "g")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", "secret")
    owner = Broker.connect(config.model_copy(update={"broker": config.broker.model_copy(update={"user": "default"})}))
    submit(owner, 1)
    broker = Broker.connect(config)
    release(owner, 1)
    (held,) = lease(broker, 1)
    assert broker.submit("g1", held, group(held.prompt.group_id))
    assert cluster.admin.acl_log() == []
    for each in (owner, broker):
        each.close()


def test_cluster_on_a_server_without_one_says_so(tmp_path: Path, on: On) -> None:
    with node(tmp_path / "n") as alone, pytest.raises(ConfigError, match=r"no cluster answers.*broker\.cluster"):
        Broker.connect(on(url=alone.url, cluster=True))


def test_url_of_the_environment_is_checked_as_the_configured_one(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    for url, options, message in (
        ("http://h", {}, "must start with redis://"),
        ("redis://:s3cret@h", {}, "must not contain a password"),
        ("redis://h", {"tls": {}}, "use rediss://"),
        ("unix:///s", {"cluster": True}, "use a redis://"),
    ):
        monkeypatch.setenv("HEADRACE_REDIS_URL", url)
        with pytest.raises(ConfigError, match=message) as caught:
            Broker.connect(on(**options))
        assert str(caught.value).startswith("HEADRACE_REDIS_URL: ") and "s3cret" not in str(caught.value)


# -- Sentinel

REPLICATED = (*DATA, "--repl-diskless-sync-delay", "0")


def _offset(server: Node) -> int:
    """How far its replication is; -1 for a replica that is not connected."""
    info = server.admin.info("replication")
    return -1 if info.get("master_link_status") == "down" else int(info["master_repl_offset"])


def _sentinel(folder: Path, port: int) -> AbstractContextManager[Node]:
    """A sentinel that is quick to replace the server at `port`."""
    conf = (
        f"sentinel monitor run 127.0.0.1 {port} 1\nsentinel down-after-milliseconds run 300\n"
        "sentinel failover-timeout run 2000\n"
    )
    return node(folder, "--sentinel", conf=conf)


def _submit_two_to_both(broker: Broker, watcher: Node, first: Node, second: Node) -> None:
    """Two groups that the replica has, too, which the sentinel knows."""
    submit(broker, 2)
    until(lambda: watcher.admin.sentinel_master("run")["num-slaves"] == 1)
    until(lambda: _offset(second) == _offset(first))


def test_sentinel_failover_keeps_the_run(tmp_path: Path, on: On) -> None:
    with node(tmp_path / "a", *REPLICATED) as first, node(tmp_path / "b", *REPLICATED) as second:
        second.admin.replicaof("127.0.0.1", first.port)
        with _sentinel(tmp_path / "s", first.port) as watcher:
            with pytest.raises(ConfigError, match=r"a Sentinel answers there; use redis\+sentinel://"):
                Broker.connect(on(url=watcher.url))
            hosts = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{watcher.port}"]  # the first sentinel is gone
            broker = Broker.connect(on(sentinel={"hosts": hosts, "service": "run"}))
            flow(broker)
            _submit_two_to_both(broker, watcher, first, second)
            first.kill()
            assert ids(broker.take(broker.begin(1, []), 4, 0)) == ["000000004", "000000005"]
            assert second.admin.role()[0] == b"master"
            flow(broker_on_url := Broker.connect(on(url=f"redis+sentinel://{','.join(hosts)}/run")))
            for each in (broker, broker_on_url):
                each.close()


# -- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ca.pem, and PEM and key of `server` (for localhost and 127.0.0.1) and `client`, signed by it."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name in ("server", "client"):
        openssl(
            "req", "-x509", *key, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE",
        )  # fmt: skip
    return folder


def _demanding(certificates: Path) -> ssl.SSLContext:
    """A server's side that asks for the client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _tls(certificates: Path, name: str = "client") -> dict[str, str]:
    names = {"ca_file": "ca.pem", "cert_file": f"{name}.pem", "key_file": f"{name}.key"}
    return {field: str(certificates / file) for field, file in names.items()}


def test_tls_with_client_certificates(cluster: Node, certificates: Path, on: On) -> None:
    port = free_port()
    with tls_front(_demanding(certificates), port, cluster.port):
        cluster.admin.config_set("cluster-announce-port", port)
        url = f"rediss://127.0.0.1:{port}"
        broker = Broker.connect(on(url=url, cluster=True, tls=_tls(certificates)))
        flow(broker)
        broker.close()
        with pytest.raises(ConfigError, match=r"broker\.cluster to true"):  # TLS let it in
            Broker.connect(on(url=url, tls=_tls(certificates)))
        with pytest.raises(ConfigError, match="no Redis or Valkey"):  # nobody the server knows
            Broker.connect(on(url=url, tls={"ca_file": _tls(certificates)["ca_file"]}))
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):  # nobody we know
            Broker.connect(on(url=url))
        cluster.admin.config_set("cluster-announce-port", 0)


def test_sentinel_failover_with_tls_on_every_hop(tmp_path: Path, certificates: Path, on: On) -> None:
    context, ports = _demanding(certificates), [free_port() for _ in range(3)]
    spoken: tuple[list[str], list[str]] = ([], [])
    with ExitStack() as stack:
        first = stack.enter_context(node(tmp_path / "a", *REPLICATED))
        second = stack.enter_context(node(tmp_path / "b", *REPLICATED, "--replica-announce-port", str(ports[1])))
        for server, port, seen in zip((first, second), ports, spoken, strict=False):
            stack.enter_context(tls_front(context, port, server.port, seen))
        second.admin.replicaof("127.0.0.1", ports[0])
        with _sentinel(tmp_path / "s", ports[0]) as watcher:
            stack.enter_context(tls_front(context, ports[2], watcher.port))
            url = f"rediss+sentinel://127.0.0.1:{ports[2]}/run"
            with pytest.raises(ConfigError, match="no Redis or Valkey"):  # nobody the sentinel knows
                Broker.connect(on(url=url, tls={"ca_file": _tls(certificates)["ca_file"]}))
            broker = Broker.connect(on(url=url, tls=_tls(certificates)))
            flow(broker)
            _submit_two_to_both(broker, watcher, first, second)
            assert "tls" in spoken[0] and "tls" not in spoken[1]
            first.kill()
            assert ids(broker.take(broker.begin(1, []), 4, 0)) == ["000000004", "000000005"]
            assert "tls" in spoken[1] and second.admin.role()[0] == b"master"
            broker.close()


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path, certificates: Path, on: On) -> None:
    good, url = _tls(certificates), "rediss://127.0.0.1:1"
    (tmp_path / "noise").write_text("noise")
    for field, value, message in (
        ("ca_file", str(tmp_path / "none.pem"), r"broker\.tls\.ca_file: .*none\.pem"),
        ("ca_file", str(tmp_path / "noise"), r"broker\.tls\.ca_file: .*noise"),
        ("cert_file", str(tmp_path / "none.pem"), r"broker\.tls\.cert_file: .*none\.pem"),
        ("key_file", str(tmp_path / "none.key"), r"broker\.tls\.key_file: .*none\.key"),
        ("key_file", str(certificates / "server.key"), r"cert_file .* and key_file .* are no pair"),
    ):
        with pytest.raises(ConfigError, match=message):
            Broker.connect(on(url=url, tls={**good, field: value}))
