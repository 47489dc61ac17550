"""Probes: loading, serving, stuck; and what the port answers."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from common.config_metrics import MetricsConfig
from common.errors import ConfigError
from common.exposition import Exposition
from common.health import Health


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_live_is_progress_and_ready_is_more() -> None:
    clock = Clock()
    health = Health(10, clock)
    assert (health.live.ok, health.ready.reason) == (False, "loading")
    reason = "no weights yet"
    health.ready_when(lambda: reason)
    assert not health.ready.ok, "a process that loads is not ready, whatever its parts say"
    health.beat()
    assert health.live.ok and (health.ready.ok, health.ready.reason) == (False, "no weights yet")
    reason = ""
    assert health.ready.ok
    clock.now = 10.5
    assert not health.live.ok and not health.ready.ok
    assert "no progress for 10 s (metrics.stalled_s 10)" in health.ready.reason
    health.beat()
    assert health.live.ok and health.ready.ok


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_port_answers_probes_and_metrics_and_gives_itself_back() -> None:
    health, registry, port = Health(10), CollectorRegistry(), _free_port()
    Gauge("headrace_example", "an example", registry=registry).set(3)
    config = MetricsConfig(port=port)
    served = Exposition(config, health, registry)
    assert _get(port, "/healthz") == (503, "loading\n")
    health.beat()
    assert _get(port, "/healthz")[0] == 200 and _get(port, "/readyz")[0] == 503
    health.ready_when(lambda: "")
    assert _get(port, "/readyz") == (200, "ready\n")
    assert "headrace_example 3.0" in _get(port, "/metrics")[1]
    assert _get(port, "/secrets")[0] == 404
    with pytest.raises(ConfigError, match=rf"metrics\.port {port} .*in use"):
        Exposition(config, health, registry)
    served.close()
    Exposition(config, health, registry).close()
