"""Serves `/metrics`, `/healthz` and `/readyz` from a thread of its own, so that a busy process still answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from common.config_metrics import MetricsConfig
from common.errors import ConfigError
from common.health import Health, Verdict


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Probes ask every few seconds."""


class Exposition:
    """The open port of a process; closed by `close`, or with the process.

    Raises:
        ConfigError: the port cannot be taken.
    """

    def __init__(self, config: MetricsConfig, health: Health, registry: CollectorRegistry) -> None:
        assert config.port is not None
        try:
            self._server = make_server(
                config.host, config.port, _application(health, registry), ThreadingWSGIServer, _Quiet
            )
        except OSError as error:
            raise ConfigError(
                f"metrics.port {config.port} on metrics.host {config.host}: {error.strerror}; use a free port of this "
                "machine, or null"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="exposition", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def expose(config: MetricsConfig, health: Health, registry: CollectorRegistry) -> Callable[[], None]:
    """Open the port if one is configured; what it returns closes it. ConfigError as `Exposition`."""
    if config.port is None:
        return lambda: None
    return Exposition(config, health, registry).close


def _application(health: Health, registry: CollectorRegistry) -> Callable[..., Iterable[bytes]]:
    metrics = make_wsgi_app(registry)
    probes: dict[str, Callable[[], Verdict]] = {"/healthz": lambda: health.live, "/readyz": lambda: health.ready}

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        if path in probes:
            verdict = probes[path]()
            status, text = ("200 OK" if verdict.ok else "503 Service Unavailable"), verdict.reason
        else:
            status, text = "404 Not Found", "there are /metrics, /healthz and /readyz"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return serve
