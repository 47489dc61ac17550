"""Servers as an operator would run them: on TCP ports, as a node of a cluster, behind sentinels, behind TLS."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from broker.server import find_binary

WAIT_S = 20.0


def free_port() -> int:
    """A port nobody listens on, low enough that a cluster's bus can have the one 10000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55000:
            return port


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`, which is asked every 20 ms while it is false or the server is away."""
    retrying = Retrying(
        retry=retry_if_result(lambda value: not value) | retry_if_exception_type(redis.RedisError),
        stop=stop_after_delay(WAIT_S),
        wait=wait_fixed(0.02),
        reraise=True,
    )
    return retrying(condition)


class Node:
    """One server process; `admin` is a client of its default user. It can be killed and started again on its data."""

    def __init__(self, folder: Path, *options: str, conf: str = "") -> None:
        folder.mkdir()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.admin = redis.Redis(port=self.port, socket_timeout=5)
        (folder / "server.conf").write_text(conf, encoding="utf-8")
        self._argv = [
            str(find_binary()), str(folder / "server.conf"), "--port", str(self.port), "--bind", "127.0.0.1",
            "--dir", str(folder), *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        until(lambda: self.admin.ping() if self.process.poll() is None else pytest.fail(f"no start: {self._argv}"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.admin.close()
        self.kill()


DATA = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")


@contextmanager
def node(folder: Path, *options: str, conf: str = "") -> Iterator[Node]:
    started = Node(folder, *options, conf=conf)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def tls_front(context: ssl.SSLContext, port: int, upstream: int, seen: list[str] | None = None) -> Iterator[None]:
    """What stunnel does: TLS on `port` of 127.0.0.1, plain to `upstream`. With `seen`, to which it adds what each
    caller spoke, it lets plain callers through too: servers talk to each other there."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listening = True

        def serve() -> None:
            while listening:
                with contextlib.suppress(OSError):
                    raw, _ = listener.accept()
                    threading.Thread(target=_answer, args=(context, raw, upstream, seen), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield
        listening = False
        listener.shutdown(socket.SHUT_RDWR)


def _answer(context: ssl.SSLContext, raw: socket.socket, upstream: int, seen: list[str] | None) -> None:
    with contextlib.suppress(OSError):
        plain = seen is not None and raw.recv(1, socket.MSG_PEEK) != b"\x16"  # a TLS handshake record
        if seen is not None:
            seen.append("plain" if plain else "tls")
        with raw if plain else context.wrap_socket(raw, server_side=True) as outer:
            _carry(outer, upstream)


def _carry(outer: socket.socket, upstream: int) -> None:
    with (
        socket.create_connection(("127.0.0.1", upstream)) as inner,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(outer, selectors.EVENT_READ, inner)
        selector.register(inner, selectors.EVENT_READ, outer)
        while True:
            for key, _ in selector.select():
                source, sink = key.fileobj, key.data
                assert isinstance(source, socket.socket)
                data = source.recv(1 << 16)
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(1 << 16)
                if not data:
                    return
                sink.sendall(data)
