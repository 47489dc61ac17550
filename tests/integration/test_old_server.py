"""A server that is too old is refused at start, by its version."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest

from broker import Broker
from common.config import Config
from common.errors import ConfigError

INFO = b"# Server\r\nredis_version:6.2.14\r\n"


class OldRedis(socketserver.StreamRequestHandler):
    """Speaks as much of the protocol as a client needs to ask for the version: no package ships such an old server."""

    def handle(self) -> None:
        while header := self.rfile.readline():
            words = []
            for _ in range(int(header[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2].upper())
            if words[0] == b"INFO":
                self.wfile.write(b"$%d\r\n%s\r\n" % (len(INFO), INFO))
            elif words[0] == b"HELLO":
                self.wfile.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            else:
                self.wfile.write(b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n")


@pytest.fixture
def old_server() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldRedis) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_connect_to_an_old_server_names_its_version(old_server: str, make_config: Callable[..., Config]) -> None:
    config = make_config(broker={"url": old_server, "password_file": None})
    with pytest.raises(ConfigError, match=r"version 6\.2\.14; use Redis >= 7\.0"):
        Broker.connect(config)
