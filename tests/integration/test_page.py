"""The live page over HTTP, from its real server: true numbers, read only, and only to whom it is meant for."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_helpers import MakeConfig, group, lease, release, submit
from valkey_helpers import free_port, until

from broker import Broker, Member
from broker import page as page_module
from broker.page import Page
from broker.pageguard import TOKEN_VARIABLE
from broker.pageview import POINTS, Curves, View
from broker.reading import read
from broker.service import run_service
from common.config import Config
from common.errors import ConfigError
from common.log import Logger

TOKEN = "a-token-that-is-long-enough"
SCRIPT = "<script>document.title = 'broken in'</script>"


def _decode(ids: Sequence[int]) -> str:
    return SCRIPT if list(ids) == [4, 5] else "?"


@contextmanager
def _page(config: Config) -> Iterator[Page]:
    page = Page(config, _decode, Logger("test", "page"))
    try:
        yield page
    finally:
        page.close()


def _get(page: Page, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(page.url.split(":")[-1].strip("/")), timeout=5)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


class _Stream:
    """A browser's end of the events."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        self._connection.request("GET", "/events")
        self.answer = self._connection.getresponse()
        assert self.answer.getheader("content-type", "").startswith("text/event-stream")

    def next(self, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        while line := self.answer.readline():
            if line.startswith(b"data: {") and wanted(found := json.loads(line[6:])):
                return found
        raise AssertionError("the stream ended")

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(page={"port": 0})


@pytest.fixture
def broker(config: Config) -> Iterator[Broker]:
    connected = Broker.connect(config)
    yield connected
    connected.close()


def test_service_shows_what_the_ledger_says(make_config: MakeConfig, tiny_model: Path) -> None:
    port = free_port()
    config = make_config(
        model={"path": str(tiny_model)}, page={"port": port}, broker={"heartbeat_s": 0.05, "member_ttl_s": 5.0}
    )
    metrics = config.run.folder / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "version": 1.0, "reward_mean": 0.5, "entropy": NaN}\n')
    stop = threading.Event()
    service = threading.Thread(target=run_service, args=(config, stop), daemon=True)
    service.start()
    broker = Broker.connect(config)
    until(lambda: broker.ledger().released == config.max_outstanding)
    broker.heartbeat(Member("g1", "generator", "serving", version=0, counters={"in_flight": 2.0}))
    first, second, third, _ = lease(broker, 4)
    assert broker.submit("g1", first, group(first.prompt.group_id))
    assert broker.submit("g1", second, group(second.prompt.group_id))
    assert broker.filtered("g1", third.entry_id, "wrong")
    epoch = broker.begin(0, [])
    (taken,) = broker.take(epoch, 1, 0)
    broker.step(epoch, 1, [taken])
    until(lambda: (config.run.folder / "page.url").exists())

    stream = _Stream(port)
    shown = stream.next(lambda found: found["version"] == 1)
    ledger, queues = broker.ledger(), broker.queues()
    assert shown["stations"] == {
        "released": ledger.released, "waiting": queues.prompts_waiting, "in_flight": 1, "queued": 1, "learner": 0,
        "unsettled": 1, "trained": 1, "settled": 0, "filtered": 1, "expired": 0, "dead": 0,
    }  # fmt: skip
    assert shown["outstanding"] == ledger.outstanding and shown["balanced"] is True
    assert shown["lag_steps"] == 1 / 4 and shown["behind"] == 1
    assert shown["record"]["reward_mean"] == 0.5 and shown["record"]["entropy"] is None
    (member,) = [each for each in shown["members"] if each["id"] == "g1"]
    assert (member["state"], member["version"], member["in_flight"]) == ("serving", 0, 2)
    broker.finish()
    broker.leave("g1")
    last = stream.next(lambda found: found["finished"])
    assert last["stations"]["released"] == broker.ledger().released
    assert any("g1 is gone" in event["text"] for event in last["events"])
    stream.close()
    service.join(10)
    assert not service.is_alive() and not (config.run.folder / "page.url").exists()
    broker.close()


def test_what_a_run_wrote_arrives_as_data_and_under_a_strict_policy(config: Config, broker: Broker) -> None:
    release(broker, 1)
    (held,) = lease(broker, 1)
    hostile = replace(held, prompt=replace(held.prompt, text=SCRIPT))
    assert broker.submit("g1", replace(hostile, entry=(b"", _packed(hostile))), group(held.prompt.group_id))
    with _page(config) as page:
        stream = _Stream(int(page.url.split(":")[-1].strip("/")))
        until(lambda: page.viewers == 1)
        page.show(broker, read(broker))
        stream.next()
        status, headers, body = _get(page, "/samples")
        (sample,) = json.loads(body)["groups"]
        assert (status, headers["content-type"]) == (200, "application/json")
        assert sample["prompt"] == SCRIPT and [each["text"] for each in sample["answers"]] == [SCRIPT, SCRIPT]
        assert sample["answers"][0]["reward"] == 1.0 and sample["answers"][0]["versions"] == [0, 0]

        for path in ("/", "/static/page.js", "/static/uPlot.iife.min.js", "/history", "/nothing-here"):
            status, headers, body = _get(page, path)
            assert status == (404 if "nothing" in path else 200)
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert path != "/" or (b"<script>" not in body and b"style=" not in body and b"://" not in body)
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            assert _get(page, "/history", method)[:1] == (405,)
        assert _get(page, "/static/../page.py")[0] == 404 and _get(page, "/static/%2e%2e/page.py")[0] == 404
        # Another site whose name was made to lead here.
        assert _get(page, "/samples", Host="evil.example:80")[0] == 403
        assert _get(page, "/samples", Host="localhost:8080")[0] == 200
        stream.close()


def _packed(held: Any) -> bytes:
    from common import wire

    return wire.encode_prompt(held.prompt)


def test_page_with_a_token_wants_it(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    caplog.set_level(logging.DEBUG)
    with _page(make_config(page={"port": 0, "host": "0.0.0.0", "token_file": file})) as page:
        paths = ("/", "/history", "/samples", "/events", "/static/page.js")
        for path in (*paths, "/?token=", "/?token=wrong", "/?token=%ff"):
            status, headers, body = _get(page, path, Host="anything.example")
            assert status == 401 and "set-cookie" not in headers and TOKEN.encode() not in body
        assert _get(page, "/history", Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert _get(page, "/history", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = _get(page, f"/?token={TOKEN}")
        cookie = headers["set-cookie"]
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        value = cookie.split(";")[0]
        assert _get(page, "/history", Cookie=value)[0] == 200
        assert _get(page, "/history", Cookie=value[:-1] + ("0" if value[-1] != "0" else "1"))[0] == 401
        assert _get(page, "/history", "POST", Cookie=value)[0] == 405
    assert TOKEN not in caplog.text and TOKEN not in "".join(capfd.readouterr())


def test_page_that_others_can_reach_needs_a_token(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposed = make_config(page={"port": 0, "host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"page\.host: '0\.0\.0\.0' can be reached by others.*token_file"):
        run_service(exposed, threading.Event())
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: the token must be 16 or more"):
        _page(exposed).__enter__()
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ConfigError, match=r"page\.token_file: .*missing cannot be read"):
        _page(make_config(page={"port": 0, "token_file": tmp_path / "missing"})).__enter__()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"page\.port {port} on page\.host 127\.0\.0\.1"):
            _page(make_config(page={"port": port})).__enter__()


def test_viewer_who_reads_nothing_holds_up_nobody_and_loses_his_place(
    config: Config, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "VIEWERS", 2)
    monkeypatch.setattr(page_module, "_PATIENCE_S", 0.3)
    with _page(config) as page:
        port = int(page.url.split(":")[-1].strip("/"))
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", port))
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = _Stream(port)
        until(lambda: page.viewers == 2)
        assert _get(page, "/events")[0] == 503, "no more than there is room for"
        fat = b'{"version":%d,"fat":"' + b"x" * 1_000_000 + b'"}'
        for version in range(12):  # more than all buffers between here and there hold
            page._loop.call_soon_threadsafe(page._publish, fat % version)
            assert stream.next()["version"] == version
        until(lambda: page.viewers == 1)
        stuck.close()
        stream.close()
        until(lambda: page.viewers == 0)


def test_events_tell_what_happened_and_answers_outlive_their_groups(config: Config, broker: Broker) -> None:
    with _page(config) as page:
        stream = _Stream(int(page.url.split(":")[-1].strip("/")))
        until(lambda: page.viewers == 1)

        def show() -> list[str]:
            page.show(broker, read(broker), finished=True)  # whatever the time
            return [event["text"] for event in stream.next()["events"]]

        show()
        member = Member("g1", "generator", "serving", version=0)
        broker.heartbeat(member)
        (group_id,) = submit(broker, 1)
        release(broker, 1)
        (held,) = lease(broker, 1)
        for _ in range(config.broker.max_attempts):
            broker.fail("g1", held.entry_id, held.prompt, "no verdict\nValueError: " + SCRIPT)
            if more := broker.lease("g1", 1, 0):
                (held,) = more
        texts = show()
        assert texts[0] == f"{held.prompt.group_id} is dead-lettered: ValueError: {SCRIPT}"
        assert texts[1] == "g1 is here (serving)"
        epoch = broker.begin(0, [])
        deliveries = broker.take(epoch, 1, 0)
        broker.step(epoch, 1, deliveries, settle=[group_id])
        assert show()[0] == "version 1"
        broker.step(epoch, 2, [])
        assert show()[0] == "version 1 to 2"
        broker.leave("g1")
        assert show()[0] == "g1 is gone"
        assert broker.newest_groups(1) == []
        assert [each["id"] for each in json.loads(_get(page, "/samples")[2])["groups"]] == [group_id]
        stream.close()


def test_tokens_a_second_are_those_of_a_while_for_answers_count_as_they_end(config: Config, broker: Broker) -> None:
    view = View(config, _decode)
    for tokens, wall_s in ((0, 10), (100, 11), (100, 12), (100, 12)):  # the last is no new heartbeat
        counters = {"tokens": float(tokens), "wall_s": float(wall_s)}
        broker.heartbeat(Member("g1", "generator", "serving", counters=counters))
        shown = json.loads(view.look(read(broker), broker.dead_letters))
    assert shown["members"][0]["tokens_per_s"] == shown["tokens_per_s"] == 50.0


def test_curves_stay_small_and_follow_a_learner_that_resumed() -> None:
    curves = Curves(("version", "x", "x_max"), limit=POINTS)
    for version in range(1, 5001):
        curves.add({"version": version, "x": float(version % 2), "x_max": version})
    found = curves.columns()
    assert POINTS / 2 <= len(found["version"]) <= POINTS and found["version"] == sorted(found["version"])
    assert found["version"][-1] == 5000 and found["x_max"][-1] == 5000
    assert np.allclose(np.array(found["x"][:-1], dtype=float), 0.5)
    curves.add({"version": 4000, "x": 7.0})
    found = curves.columns()
    assert found["version"][-1] == 4000 and found["x"][-1] == 7.0 and max(found["version"][:-1]) < 4000
    curves.add({"version": None, "x": 1.0})
    assert curves.columns()["version"][-1] == 4000
