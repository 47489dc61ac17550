"""`headrace autoscale` on a real Valkey and an API server that knows nothing but one scale."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker import Broker, Member
from broker.autoscale import Autoscaler, Consumed, Observation, Produced
from broker.cli_autoscale import follow
from broker.hunger import observe
from broker.scaling import KubernetesScale, Pace, ScaleError
from common import log as logs
from common.config import AutoscaleConfig
from common.errors import ConfigError, HeadraceError
from tests.integration.broker_helpers import MakeConfig, lease, release, submit

PATH = "/apis/apps/v1/namespaces/rl/deployments/my-run-generator/scale"


class Api:
    """An API server; `replicas` is the scale, `failing` the code it answers with, `requests` what it was asked."""

    def __init__(self) -> None:
        self.replicas, self.failing, self.requests = 2, 0, list[tuple[str, str, Any, str]]()
        self.asked = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
                api.requests.append((self.command, self.path, body, self.headers["Authorization"]))
                if body is not None and not api.failing:
                    api.replicas = body["spec"]["replicas"]
                self.send_response(api.failing or 200)
                self.end_headers()
                self.wfile.write(json.dumps({"spec": {"replicas": api.replicas}}).encode())
                api.asked.set()

            do_GET = do_PATCH = _answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def scale(self, token: Path) -> KubernetesScale:
        url = f"http://127.0.0.1:{self.server.server_port}"
        return KubernetesScale(url, "rl", "my-run-generator", token_file=token)


@pytest.fixture
def api() -> Iterator[Api]:
    found = Api()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path / "token"


def member(name: str, role: str, state: str = "serving", **counters: float) -> Member:
    return Member(id=name, role=role, state=state, counters=counters)  # type: ignore[arg-type]


def looked_at(broker: Broker, at: float) -> Observation:
    return observe(broker.config, broker.members(), broker.queues(), at)


def test_run_is_seen_by_its_queues_and_heartbeats(broker: Broker) -> None:
    submit(broker, 2)
    release(broker, 2)
    lease(broker, 1)
    broker.heartbeat(member("g1", "generator", groups=5, wall_s=100, blocked_s=20))
    broker.heartbeat(member("g2", "generator", state="joining", groups=0, wall_s=9, blocked_s=0))
    broker.heartbeat(member("learner", "learner", steps=3, step_s=30, starved_s=7))
    seen = looked_at(broker, 12.0)
    assert seen.at == 12.0
    assert seen.backlog == 2
    assert seen.capacity == broker.config.max_outstanding - 1
    assert seen.generators == {"g1": Produced(5, 80), "g2": None}
    assert seen.learner == Consumed(3, 30, 7)


def test_learner_that_does_not_count_yet_is_not_known(broker: Broker) -> None:
    broker.heartbeat(member("learner", "learner"))
    assert looked_at(broker, 0.0).learner is None


def test_scale_is_read_and_patched_with_the_token(api: Api, token: Path) -> None:
    scale = api.scale(token)
    assert scale.read() == 2
    scale.write(5)
    assert scale.read() == 5
    assert [each[:3] for each in api.requests] == [
        ("GET", PATH, None),
        ("PATCH", PATH, {"spec": {"replicas": 5}}),
        ("GET", PATH, None),
    ]
    assert {each[3] for each in api.requests} == {"Bearer secret"}


def test_refusal_of_the_api_server_is_one_line(api: Api, token: Path) -> None:
    api.failing = 403
    with pytest.raises(ScaleError, match="GET of the scale of Deployment my-run-generator: 403 Forbidden"):
        api.scale(token).read()


def test_outside_a_cluster_apply_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        KubernetesScale.of_this_cluster("rl", "x", "Deployment")


def test_fleet_is_scaled_to_the_wish_and_an_api_server_that_fails_is_asked_again(
    broker: Broker, api: Api, token: Path
) -> None:
    broker.heartbeat(member("g1", "generator"))
    scaler = Autoscaler(AutoscaleConfig(min=3, max=8), broker.config.learner.groups_per_step, start=2)
    stop, api.failing = threading.Event(), 500
    log = logs.setup("x", "autoscaler")
    pace = Pace(3, 8)
    arguments = (broker, scaler, pace, api.scale(token), log, stop, 0.01)
    thread = threading.Thread(target=follow, args=arguments, daemon=True)
    thread.start()
    assert api.asked.wait(10)
    api.failing = 0
    while api.replicas != 3:
        assert thread.is_alive()
        api.asked.clear()
        assert api.asked.wait(10)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert {each[2]["spec"]["replicas"] for each in api.requests if each[2]} == {3}


def test_run_that_nobody_has_begun_is_one_line_and_no_traceback(make_config: MakeConfig) -> None:
    reader = Broker.connect(make_config(), reader=True)
    try:
        with pytest.raises(HeadraceError):
            looked_at(reader, 0.0)
    finally:
        reader.close()
