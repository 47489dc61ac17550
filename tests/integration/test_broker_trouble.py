"""The broker in trouble: a server that dies, drops connections or is full; users that may do only what they must."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
from broker_helpers import MakeConfig, group, ids, lease, partial_group, prompt, release, submit
from typer.testing import CliRunner
from valkey_helpers import DATA, Node, node, until

from broker import Broker, BrokerFullError, Member, until_taken
from broker.acl import ROLES, Role, rules, user_name
from broker.elastic import Meeting
from broker.reading import read
from broker.records import EvalResult
from common.cli import app
from common.config import Config
from common.errors import HeadraceError
from common.trajectory import EvalAnswers, Group

On = Callable[..., Config]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    for name in ("URL", "USER", "PASSWORD"):
        monkeypatch.delenv(f"HEADRACE_REDIS_{name}", raising=False)
    with node(tmp_path / "n", *DATA) as started:
        yield started


@pytest.fixture
def config(server: Node, make_config: MakeConfig) -> Config:
    return make_config(broker={"url": server.url, "password_file": None})


# -- restarts and dropped connections


def test_reads_writes_and_heartbeats_go_on_through_a_kill_and_dropped_connections(
    server: Node, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    ttl = 0.5  # longer than a call takes, restarts aside, which make the writer's leases look old: it renews none
    config = make_config(broker={"url": server.url, "password_file": None, "lease_ttl_s": ttl})
    reader, writer, beating = (Broker.connect(config) for _ in range(3))
    submit(writer, 1)
    epoch = reader.begin(0, [])
    stop, away = threading.Event(), threading.Event()
    seen: list[str] = []

    def read() -> None:  # blocks in the server nearly all of the time
        while not stop.is_set():
            seen.extend(ids(reader.take(epoch, 4, 5000)))

    def write() -> None:
        while not stop.is_set():
            # Its answer may be that somebody has released them: an earlier copy of the call, whose reply was lost.
            writer.release([prompt(position := writer.position())], position)
            hand_in(writer)

    def hand_in(broker: Broker) -> None:
        for each in broker.lease("g1", 4, 0):
            assert broker.submit("g1", each, group(each.prompt.group_id))

    def beat() -> None:
        while not stop.is_set():
            beating.heartbeat(Member("g1", "generator", "serving"))

    def advance() -> bool:
        before = len(seen)
        until(lambda: len(seen) > before + 2)
        return True

    with ThreadPoolExecutor(3) as pool, caplog.at_level(logging.WARNING, "headrace.broker"):
        jobs = [pool.submit(job) for job in (read, write, beat)]
        try:
            assert advance()
            server.kill()
            away.wait(2.0)
            assert not any(job.done() for job in jobs)
            server.start()
            assert advance()
            for _ in range(3):
                server.admin.client_kill_filter(_type="normal", skipme=True)
                assert advance()
        finally:
            stop.set()
        submit(beating, 1, "g2")  # wakes the reader
        for job in jobs:
            job.result(20)
    while writer.queues().prompts_leased:  # leased by a call whose reply was lost
        writer.reclaim()
        hand_in(writer)
    while taken := ids(reader.take(epoch, 128, 0)):
        seen += taken
    ledger = writer.ledger()
    assert ledger.balanced and ledger.duplicates == 0
    assert len(seen) == len(set(seen)) == ledger.released == ledger.submitted == writer.position()
    assert [each.id for each in writer.members()] == ["g1"]
    lines = [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()]
    assert 3 <= len(lines) <= 20  # one for each outage and caller
    for each in (reader, writer, beating):
        each.close()


def test_a_server_away_for_longer_than_reconnect_s_is_an_error(server: Node, make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(broker={"url": server.url, "password_file": None, "reconnect_s": 0.2}))
    server.kill()
    with pytest.raises(HeadraceError, match=r"no answer for 0\.2 s|no answer for 0 s"):
        broker.version()


# -- a full server


def _big(group_id: str) -> Group:
    """A group of 400 KB."""
    small = group(group_id)
    tokens = np.arange(25_000, dtype=np.int32)
    response = replace(small.responses[0], token_ids=tokens, logprobs=np.zeros(25_000, dtype=np.float32))
    return replace(small, responses=(response, response))


@pytest.mark.parametrize("bound", ["maxmemory", "max_bytes"])
def test_a_full_server_makes_producers_wait_while_the_learner_drains_it(
    server: Node,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
) -> None:
    monkeypatch.setattr("broker.pressure.QUIET_S", 0.0)
    options = {"max_bytes": 2_000_000} if bound == "max_bytes" else {}
    config = make_config(broker={"url": server.url, "password_file": None, **options})
    generator, learner, late = Broker.connect(config), Broker.connect(config), None
    release(generator, 30)
    leases = lease(generator, 30)
    if bound == "maxmemory":
        server.admin.config_set("maxmemory", server.admin.info("memory")["used_memory"] + 4_000_000)
    caplog.set_level(logging.WARNING, "headrace.broker")

    def fill() -> int:
        for count in range(1000):
            try:
                assert generator.submit("g1", leases[0], _big(leases[0].prompt.group_id))
            except BrokerFullError:
                return count
            leases.pop(0)
        raise AssertionError("never full")

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    first = fill()
    assert 3 <= first < 20
    with pytest.raises(BrokerFullError):
        generator.submit("g1", leases[0], _big(leases[0].prompt.group_id))
    if bound == "maxmemory":
        limit = server.admin.config_get("maxmemory")["maxmemory"]
        server.admin.config_set("maxmemory", "1mb")  # a small entry would still fit
        assert not generator.release([prompt(30)], 30)
        server.admin.config_set("maxmemory", limit)
    assert len(lines()) == 1 and "full, producers wait" in lines()[0]
    # Everything else goes on, for a learner that starts only now too.
    late = Broker.connect(config)
    late.heartbeat(Member("g1", "generator", "serving"))
    assert late.renew("g1", [leases[0].entry_id]) == [leases[0].entry_id]
    assert generator.filtered("g1", leases.pop().entry_id, "wrong")
    late.announce({"type": "weights"})
    late.acknowledge({"type": "applied"})
    seen: list[str] = []
    epoch = late.begin(0, [])
    for version in range(1, 100):
        taken = late.take(epoch, 4, 0)
        if not taken:
            break
        seen += ids(taken)
        late.discard(epoch, taken[:1])
        late.step(epoch, version, taken[1:])
        assert late.settle(epoch, ids(taken[1:])) == len(taken) - 1
    assert len(seen) == first

    second = fill()
    assert second >= first - 2
    assert "takes prompts and groups again" in lines()[1] and generator.pressure.seconds > 0
    learner.finish()
    while taken := late.take(epoch, 4, 0):
        late.step(epoch, version, taken)
        version += 1
        late.settle(epoch, ids(taken))
        seen += ids(taken)
    ledger = late.ledger()
    assert ledger.balanced and len(seen) == len(set(seen)) == ledger.submitted == first + second
    assert ledger.outstanding == len(leases)
    for each in (generator, learner, late):
        each.close()


async def test_a_producer_waits_with_its_lease_until_the_learner_has_made_room(
    server: Node, make_config: MakeConfig
) -> None:
    options = {"url": server.url, "password_file": None, "max_bytes": 500_000, "lease_ttl_s": 0.3}
    broker = Broker.connect(make_config(broker=options))
    release(broker, 3)
    leases = lease(broker, 3)
    for each in leases[:2]:
        assert broker.submit("g1", each, _big(each.prompt.group_id))
    last = leases[2]
    waiting = asyncio.create_task(
        until_taken(lambda: broker.submit("g1", last, _big(last.prompt.group_id)))
    )
    while broker.pressure.seconds == 0.0:  # refused twice
        assert broker.renew("g1", [last.entry_id]) == [last.entry_id]
        await asyncio.sleep(0.01)
    assert broker.reclaim() == [] and not waiting.done()
    epoch = broker.begin(0, [])
    broker.expire(epoch, broker.take(epoch, 2, 0))
    assert await waiting and ids(broker.take(epoch, 2, 0)) == [last.prompt.group_id]
    broker.close()


# -- users


@pytest.fixture
def users(server: Node, make_config: MakeConfig, tmp_path: Path) -> Iterator[dict[Role, Broker]]:
    """A broker for each role, of the user that `headrace broker acl` describes."""
    config = make_config(broker={"url": server.url, "password_file": None, "lease_ttl_s": 0.02})
    server.admin.execute_command("ACL", "LOG", "RESET")
    found: dict[Role, Broker] = {}
    for role in ROLES:
        file = tmp_path / role
        file.write_text(f"{role}-secret")
        words = rules(config.run.run_id, role)
        server.admin.execute_command("ACL", "SETUSER", user_name(role), *words, "on", f">{role}-secret")
        own = config.broker.model_copy(update={"user": user_name(role), "password_file": file, "max_bytes": 10**9})
        connected = config.model_copy(update={"broker": own})
        found[role] = Broker.connect(connected, reader=role in ("reader", "operator"))
    yield found
    for each in found.values():
        each.close()


def test_each_role_can_do_its_work_with_its_own_user(server: Node, users: dict[Role, Broker]) -> None:
    service, generator, learner, reader, operator = (users[role] for role in ROLES)
    # the service
    assert service.position() == 0 and not service.finished()
    assert service.release([prompt(each) for each in range(8)], 0)
    assert not service.heartbeat(Member("broker", "broker", "serving"))
    service.invite(Meeting("10.0.0.7", 29400, "one"))
    service.resize(3)
    assert service.begin_evaluation(0, [prompt(100), prompt(101)]) == "begun"
    # a generator
    generator.heartbeat(Member("g1", "generator", "serving"))
    assert generator.members("learner") == [] and generator.version() == 0 and generator.last_control() == "0-0"
    leases = generator.lease("g1", 6, 100)
    assert generator.renew("g1", [each.entry_id for each in leases[:1]])
    for each in leases[:3]:
        assert generator.submit("g1", each, group(each.prompt.group_id))
    assert generator.filtered("g1", leases[3].entry_id, "wrong")
    generator.fail("g1", leases[4].entry_id, replace(leases[4].prompt, attempt=2), "reward raised")
    for index in range(2):
        held = generator.lease_evaluation("g1", 0)
        assert held is not None and held.index == index
        generator.renew_evaluation("g1", held.entry_id)
        assert generator.answer_evaluation(held.entry_id, EvalAnswers(0, index, ()))
    assert generator.keep_partial("g1", leases[5].entry_id, partial_group("000000005"))
    generator.give_back("g1", leases[5].entry_id, leases[5].prompt)
    *_, again = generator.lease("g1", 9, 0)
    assert again.partial is not None and again.partial.tokens == 5
    # the service
    service.drain(service.members("generator")[0])
    assert generator.heartbeat(Member("g1", "generator", "serving"))
    until(service.reclaim)
    state = service.evaluation()
    assert state.open is not None and len(service.evaluation_answers()) == 2
    result = EvalResult(0, 0.5, 0.1, 0.5, 2.0, 0.0, 0, 0, 2, 1, 0, 1.0)
    service.end_evaluation(0, result)
    assert service.begin_evaluation(1, [prompt(102)]) == "begun"
    service.end_evaluation(1, None)
    assert service.ledger().balanced
    assert service.wait_event("0", 0) != "0"
    # the learner
    assert learner.meeting() == Meeting("10.0.0.7", 29400, "one") and service.wished_ranks() == 3
    epoch = learner.begin(0, [])
    first, second, third = learner.take(epoch, 8, 0)
    assert learner.take(epoch, 8, 1) == []
    learner.expire(epoch, [first])
    learner._drop(epoch, "dead", "damaged", 0, [(second.entry_id, second.group.group_id, "")])
    learner.step(epoch, 1, [third])
    assert learner.settle(epoch, ids([third])) == 1
    learner.begin(1, [])
    learner.announce({"type": "weights"})
    learner.heartbeat(Member("learner", "learner", "serving"))
    assert learner.ledger().balanced
    assert generator.controls("0", 100)
    generator.acknowledge({"type": "applied"})
    assert learner.acks("0", 100) and learner.last_ack() != "0-0" and learner.members("generator")
    learner.finish()
    generator.leave("g1")
    service.leave("broker")
    # a reader
    assert reader.ledger().balanced and reader.queues().dead_letters == 2 and reader.version() == 1
    assert len(reader.members()) == 1 and reader.dead_letters()[0].error == "damaged"
    assert read(reader).wished_ranks == 3 and read(service).version == 1  # `headrace top` and the service
    assert reader.evaluation().result == result and reader.finished()
    # an operator
    operator.resize(2)
    operator.drain(operator.members("learner")[0])
    assert operator.retry_dead(operator.dead_letters()[-1]) and operator.drop_dead(operator.dead_letters()[0])
    assert operator.ledger().balanced and operator.queues().dead_letters == 0

    assert server.admin.acl_log() == []


def test_no_user_can_do_another_s_work(server: Node, users: dict[Role, Broker]) -> None:
    service, generator, learner, reader, operator = (users[role] for role in ROLES)
    service.release([prompt(0)], 0)
    (held,) = generator.lease("g1", 1, 0)
    generator.submit("g1", held, group("000000000"))
    (taken,) = learner.take(epoch := learner.begin(0, []), 1, 0)
    groups, state, prompts = generator.keys.groups, generator.keys.state, generator.keys.prompts
    refused: list[Callable[[], object]] = [
        lambda: generator.settle(epoch, ["000000000"]),
        lambda: generator.expire(epoch, [taken]),
        lambda: generator.begin(0, []),
        lambda: generator.finish(),
        lambda: generator.release([prompt(1)], 1),
        lambda: service.begin(0, []),
        lambda: reader.leave("g1"),
        lambda: reader.announce({}),
        lambda: operator.release([prompt(1)], 1),
    ]
    raw: list[tuple[Broker, tuple[str | int, ...]]] = [
        (generator, ("XDEL", groups, taken.entry_id)),
        (generator, ("XRANGE", groups, "-", "+")),
        (generator, ("DEL", groups)),
        (generator, ("HSET", generator.keys.drains, "g2", "1@host")),
        (learner, ("HGET", generator.keys.partial, "000000000")),
        (generator, ("HSET", state, "epoch", 9)),
        (generator, ("EVAL", "return redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)", 1, groups)),
        (learner, ("XREADGROUP", "GROUP", "generators", "x", "STREAMS", prompts, ">")),
        (reader, ("HSET", state, "epoch", 9)),
        *((each, words) for each in users.values() for words in (
            ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST"), ("MONITOR",), ("SET", "other", 1),
            ("XADD", "headrace:{other}:groups", "*", "g", "1"),
        )),
    ]  # fmt: skip
    for attempt in refused:
        with pytest.raises(HeadraceError, match="`headrace broker acl`"):
            attempt()
    for each, words in raw:
        with pytest.raises(redis.exceptions.NoPermissionError):
            try:
                each._client.execute_command(*words)
            except redis.ResponseError as error:
                if "ACL failure in script" not in str(error):
                    raise
                raise redis.exceptions.NoPermissionError(str(error)) from None
    assert learner.settle(epoch, ["000000000"]) == 0 and server.admin.xlen(groups) == 1


def test_acl_command_prints_what_the_server_takes_and_no_password(
    server: Node, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", "s3cret")
    path = tmp_path / "run.yaml"
    path.write_text(config.model_dump_json(), encoding="utf-8")  # JSON is YAML
    result = CliRunner().invoke(app, ["broker", "acl", str(path), "--set", "broker.cluster=true"])
    assert result.exit_code == 0 and "s3cret" not in result.output
    lines = result.output.splitlines()
    assert [line.split()[2] for line in lines] == [user_name(role) for role in ROLES]
    for line in lines:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        assert server.admin.execute_command(*words) in ("OK", True, b"OK")
