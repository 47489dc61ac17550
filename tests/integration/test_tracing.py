"""Traces of prompts' lives, with a real Valkey and a real HTTP server in the collector's place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import redis
import yaml
from broker_helpers import group, lease, prompt, release
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import ValidationError
from typer.testing import CliRunner

from broker import Broker, Server
from broker.acl import rules, user_name
from broker.cli_trace import timeline
from broker.clients import Endpoint
from broker.spans import Exporter
from broker.tracing import Event, chosen, in_order
from common.config import Config, TracingConfig
from common.errors import ConfigError
from common.log import Logger

MakeConfig = Callable[..., Config]
GROUP = "000000000"


@pytest.fixture
def traced(make_config: MakeConfig) -> Iterator[Broker]:
    broker = Broker.connect(make_config(tracing={"sample": 1.0}))
    yield broker
    broker.close()


def live(broker: Broker, consumer: str = "g1") -> None:
    """The whole life of one prompt, as feeder, generator and learner live it."""
    release(broker, 1)
    (held,) = lease(broker, 1, consumer)
    broker.mark("sampled", [held.prompt.group_id], consumer, 0)
    broker.mark("scored", [held.prompt.group_id], consumer, 0)
    assert broker.submit(consumer, held, group(held.prompt.group_id))
    epoch = broker.begin(0, ())
    deliveries = broker.take(epoch, 1, 0)
    broker.step(epoch, 1, deliveries)
    broker.settle(epoch, [each.group.group_id for each in deliveries])


LIFE = ["released", "leased", "sampled", "scored", "submitted", "taken", "trained", "settled"]


def names(broker: Broker, group_id: str = GROUP) -> list[str]:
    return [event.name for event in broker.life(group_id)]


def test_life_from_release_to_settling_is_kept_in_order_with_who_and_what(traced: Broker) -> None:
    live(traced)
    life = traced.life(GROUP)
    assert [event.name for event in life] == LIFE
    assert [event.member for event in life] == ["", *["g1"] * 4, *[life[-1].member] * 3]
    assert life[-1].member.startswith("learner-")
    assert life[6].version == 1
    times = [event.at_ms for event in life]
    assert times == sorted(times)


def test_without_a_sample_no_key_is_written(broker: Broker) -> None:
    live(broker)
    broker.reclaim()
    assert broker._client.exists(broker.keys.trace) == 0
    assert broker.ledger().settled == 1


def test_share_of_the_groups_is_traced_and_every_process_decides_alike(make_config: MakeConfig) -> None:
    ids = [f"{number:09d}" for number in range(10_000)]
    assert 900 < sum(chosen(each, 0.1) for each in ids) < 1100
    assert {each for each in ids if chosen(each, 0.1)} <= {each for each in ids if chosen(each, 0.2)}
    broker = Broker.connect(make_config(tracing={"sample": 0.1}))
    release(broker, 64)
    assert {event.group_id for event in broker.trace()} == {each for each in ids[:64] if chosen(each, 0.1)}
    broker.close()


def test_reclaimed_life_shows_both_leases_and_the_late_answer(make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(tracing={"sample": 1.0}, broker={"lease_ttl_s": 0.001, "member_ttl_s": 0.001}))
    release(broker, 1)
    (first,) = lease(broker, 1, "g1")
    while not broker.reclaim():  # a millisecond has to pass
        pass
    (second,) = lease(broker, 1, "g2")
    assert broker.submit("g2", second, group(GROUP))
    assert not broker.submit("g1", first, group(GROUP))
    life = broker.life(GROUP)
    assert [event.name for event in life] == ["released", "leased", "reclaimed", "leased", "submitted", "late"]
    assert [event.member for event in life] == ["", "g1", "g1", "g2", "g2", "g1"]
    broker.close()


def test_expiry_failure_filter_and_death_are_events_of_a_life(traced: Broker) -> None:
    release(traced, 3)
    expires, filtered, dies = lease(traced, 3)
    assert traced.submit("g1", expires, group(GROUP))
    epoch = traced.begin(0, ())
    traced.expire(epoch, traced.take(epoch, 1, 0))
    assert names(traced) == ["released", "leased", "submitted", "taken", "expired"]
    assert traced.filtered("g1", filtered.entry_id, "wrong")
    assert names(traced, "000000001") == ["released", "leased", "filtered"]
    held = dies
    for _ in range(traced.config.broker.max_attempts):
        traced.fail("g1", held.entry_id, held.prompt, "the reward raised")
        leases = {each.prompt.group_id: each for each in traced.lease("g1", 2, 0)}
        held = leases.get(dies.prompt.group_id, held)
    assert names(traced, "000000002") == ["released", *["leased", "failed"] * 2, "leased", "dead"]
    assert traced.life("000000002")[-1].detail == "the reward raised"


def test_group_delivered_again_to_a_resumed_learner_is_one_life(traced: Broker) -> None:
    release(traced, 1)
    (held,) = lease(traced, 1)
    traced.submit("g1", held, group(GROUP))
    earlier = traced.begin(0, ())
    traced.take(earlier, 1, 0)
    epoch = traced.begin(0, ())
    traced.step(epoch, 1, traced.take(epoch, 1, 0))
    assert names(traced)[3:] == ["taken", "taken", "trained"]
    assert [event.member for event in traced.life(GROUP)][3:] == [f"learner-{each}" for each in (earlier, epoch, epoch)]


def test_line_that_cannot_be_written_costs_the_prompt_nothing(
    traced: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    traced._client.set(traced.keys.trace, "not a stream")
    live(traced)
    assert traced.ledger().settled == 1
    assert len([each for each in caplog.records if "traces have gaps" in each.getMessage()]) == 1


def test_line_that_a_faster_process_overtook_is_put_before_its() -> None:
    events = [Event(1, "released", GROUP), Event(2, "leased", GROUP), Event(5, "taken", GROUP)]
    late = Event(6, "submitted", GROUP)
    assert [(each.name, each.at_ms) for each in in_order([*events, late])][2:] == [("submitted", 5), ("taken", 5)]


def test_roles_may_write_and_read_what_is_theirs(make_config: MakeConfig, valkey: Server) -> None:
    config = make_config(tracing={"sample": 1.0})
    admin = Broker.connect(config)
    brokers = {}
    for role in ("broker", "generator", "learner", "reader"):
        user = f"{user_name(role)}-{config.run.run_id}"
        admin._client.execute_command("ACL", "SETUSER", user, *rules(config.run.run_id, role), "on", ">secret")
        section = config.broker.model_copy(update={"user": user, "password_file": None})
        mine = config.model_copy(update={"broker": section})
        brokers[role] = Broker.connect(mine, Endpoint(valkey.url, "secret", user), reader=role == "reader")
    release(brokers["broker"], 1)
    (held,) = lease(brokers["generator"], 1)
    assert brokers["generator"].submit("g1", held, group(GROUP))
    learner = brokers["learner"]
    epoch = learner.begin(0, ())
    learner.step(epoch, 1, learner.take(epoch, 1, 0), [GROUP])
    assert names(brokers["reader"]) == ["released", "leased", "submitted", "taken", "trained", "settled"]
    with pytest.raises(redis.exceptions.NoPermissionError):
        brokers["reader"]._client.xadd(admin.keys.trace, {"g": "x"})
    for each in (admin, *brokers.values()):
        each.close()


# --- headrace trace


def test_command_prints_the_timeline(traced: Broker, tmp_path_factory: pytest.TempPathFactory) -> None:
    import typer

    from broker.cli_trace import trace

    live(traced)
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(yaml.safe_dump(traced.config.model_dump(mode="json")))
    app = typer.Typer()
    app.command()(trace)
    result = CliRunner().invoke(app, [str(path), GROUP])
    assert result.exit_code == 0, result.output
    first, _, *lines = result.output.splitlines()
    assert first == f"group {GROUP} of run {traced.config.run.run_id}"
    shape = re.compile(r"\d\d:\d\d:\d\d\.\d{3} +\d+\.\d{3} s +\d+\.\d{3} s  (\w+)")
    assert [match[1] for match in map(shape.match, lines) if match] == LIFE
    unknown = CliRunner().invoke(app, [str(path), "42"])
    assert isinstance(unknown.exception, ConfigError)
    assert str(unknown.exception) == f"GROUP: '42' is not among the traced ones; those that are kept: {GROUP}"


def test_timeline_has_seconds_since_the_first_and_the_last_event() -> None:
    life = [Event(0, "released", GROUP), Event(1500, "leased", GROUP, "g1"), Event(4000, "filtered", GROUP, "g1")]
    assert [line.split()[1:5] for line in timeline(life)[1:]] == [
        ["0.000", "s", "0.000", "s"], ["1.500", "s", "1.500", "s"], ["4.000", "s", "2.500", "s"]
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [{"sample": 1.5}, {"endpoint": "collector:4318"}, {"endpoint": "http://a:b@host"}])
def test_tracing_section_refuses_what_cannot_work(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TracingConfig.model_validate(fields)


# --- spans


class Collector:
    """An OTLP/HTTP endpoint that keeps the spans it is sent, or answers with `status`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status, outer = 200, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.status == 200:
                    request = ExportTraceServiceRequest.FromString(body)
                    outer.spans += [
                        span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans
                    ]
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_ended_life_is_sent_as_one_trace_with_a_span_for_each_stretch(traced: Broker, collector: Collector) -> None:
    exporter = Exporter(traced, collector.endpoint, Logger("run", "broker"))
    live(traced)
    traced.release([prompt(1)], 1)  # goes on: is not sent
    exporter.look(0)
    root, *stretches = collector.spans
    assert (root.name, root.parent_span_id) == ("prompt", b"")
    assert [span.name for span in stretches] == [
        "queued", "sampling", "scoring", "submitting", "waiting", "training", "unsettled"
    ]  # fmt: skip
    assert {span.parent_span_id for span in stretches} == {root.span_id}
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == 8
    assert [event.name for event in root.events] == LIFE
    edges = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in stretches)]
    assert [span.start_time_unix_nano for span in stretches] == edges[:-1]
    assert edges[-1] == root.end_time_unix_nano


def test_service_that_starts_again_sends_the_same_trace(traced: Broker, collector: Collector) -> None:
    live(traced)
    for _ in range(2):
        Exporter(traced, collector.endpoint, Logger("run", "broker")).look(0)
    assert len(collector.spans) == 16
    assert collector.spans[:8] == collector.spans[8:]


def test_stop_sends_what_has_ended_by_then(traced: Broker, collector: Collector) -> None:
    live(traced)
    stopping = threading.Event()
    stopping.set()
    Exporter(traced, collector.endpoint, Logger("run", "broker")).run(stopping)
    assert len(collector.spans) == 8


def test_collector_that_refuses_costs_spans_and_one_warning(
    traced: Broker, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(traced, collector.endpoint, Logger("run", "broker"))
    collector.status = 400
    for position in range(2):
        release(traced, 1)
        (held,) = lease(traced, 1)
        assert held.prompt.group_id == f"{position:09d}"
        traced.filtered("g1", held.entry_id, "wrong")
        exporter.look(0)
    assert len([each for each in caplog.records if "takes no spans" in each.getMessage()]) == 1
    assert collector.spans == []
