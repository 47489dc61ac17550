"""The live page of a run: Starlette under uvicorn, in a thread of the broker service.

Promises: it only reads. The run is read once a second, by the service, however many look; who does not read what he is
sent loses it, and after a while his place, and holds up nobody. Without a token the page is for this machine only, and
only under a name of this machine, so that no other site's script can read it through a name of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from broker.pageguard import Guard, token_of, url_file
from broker.pageview import GROUPS, View
from broker.reading import REFRESH_S, Reading
from broker.store import Broker
from common.config import Config, PageConfig
from common.errors import ConfigError, HeadraceError
from common.log import Logger

VIEWERS = 32
_CONNECTIONS = 128
_ALIVE_S = 2.0  # without news: a sign of life
_PATIENCE_S = 10.0  # with a viewer who reads nothing
_SAMPLES_S = 4.0
_STATIC = Path(__file__).parent / "static"


class Page:
    """The page on an open port; closed by `close`, or with the process.

    Args:
        config: the run; `page.port` is set.
        decode: token ids to text, for the sample answers.

    Attributes:
        url: where it is.
        viewers: streams that are open.

    Raises:
        ConfigError: the port cannot be taken, or as `token_of`.
    """

    def __init__(self, config: Config, decode: Callable[[Sequence[int]], str], log: Logger) -> None:
        page = config.page
        token = token_of(page)
        self._config, self._log, self._view = config, log, View(config, decode)
        self._socket = _bound(page)
        host = f"[{page.host}]" if ":" in page.host else page.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}/"
        self.viewers = 0
        self._latest, self._serial, self._closing = b"", 0, False
        self._shown_at = self._sampled_at = -1e9
        self._server = uvicorn.Server(
            uvicorn.Config(
                Guard(self._application(), token, log), http="h11", ws="none", lifespan="off", interface="asgi3",
                log_config=None, log_level="critical", access_log=False, server_header=False, proxy_headers=False,
                limit_concurrency=_CONNECTIONS, timeout_graceful_shutdown=2,
            )
        )  # fmt: skip
        started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(started),), name="page", daemon=True)
        self._thread.start()
        started.wait()
        log.info("page: %s%s", self.url, " (needs its token)" if token else "")
        with suppress(OSError):  # without a folder of the run nobody waits for it there
            url_file(config).write_text(self.url, encoding="utf-8")

    def show(self, broker: Broker, reading: Reading, finished: bool = False) -> None:
        """Send a snapshot of `reading` to who looks, at most one a second unless it is the last one. Called by one
        thread; what goes wrong here is shown and logged, and does not stop the run."""
        if not finished and reading.at - self._shown_at < REFRESH_S / 2:
            return
        self._shown_at = reading.at
        try:
            self._show(broker, reading, finished)
        except Exception as error:
            if self._view.say("error", repr(error)):
                self._log.exception("page: no snapshot")

    def _show(self, broker: Broker, reading: Reading, finished: bool) -> None:
        try:
            if self.viewers and (finished or reading.at - self._sampled_at >= _SAMPLES_S):
                self._sampled_at = reading.at
                self._view.keep(broker.newest_groups(GROUPS))
            snapshot = self._view.look(reading, broker.dead_letters, finished)
        except HeadraceError as error:  # a right that the server does not give, for instance
            if self._view.say("error", str(error)):
                self._log.warning("page: %s", error)
            snapshot = self._view.look(reading, lambda _: [], finished)
        self._loop.call_soon_threadsafe(self._publish, snapshot)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._socket.close()
        with suppress(OSError):
            url_file(self._config).unlink()

    # --- in the thread of the loop

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._server.serve(sockets=[self._socket])

    def _publish(self, snapshot: bytes) -> None:
        self._latest, self._serial = snapshot, self._serial + 1
        self._wake()

    def _end(self) -> None:
        self._closing = self._server.should_exit = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _application(self) -> Starlette:
        def index(request: Request) -> Response:
            return FileResponse(_STATIC / "index.html")

        def history(request: Request) -> Response:
            return Response(self._view.history(), media_type="application/json")

        def samples(request: Request) -> Response:
            return Response(self._view.samples(), media_type="application/json")

        async def events(request: Request) -> Response:
            return Stream(self) if self.viewers < VIEWERS else PlainTextResponse(f"{VIEWERS} already look", 503)

        return Starlette(routes=[
            Route("/", index), Route("/history", history), Route("/samples", samples), Route("/events", events),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ])  # fmt: skip

    async def feed(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        """Put the newest snapshot whenever there is one, until the page closes."""
        serial = 0
        await put(b"retry: 2000\n\n")
        while True:
            news = self._news
            if self._serial != serial:
                serial = self._serial
                await put(b"data: " + self._latest + b"\n\n")
            elif self._closing:
                return
            else:
                await put(b"event: alive\ndata: 1\n\n")
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 0 if self._closing else _ALIVE_S)


class Stream(Response):
    """Server-sent events of a page, to one viewer."""

    media_type = "text/event-stream"

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._page.viewers += 1
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        feed = asyncio.create_task(self._feed(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({feed, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._page.viewers -= 1
            for task in (feed, gone):
                task.cancel()
            await asyncio.gather(feed, gone, return_exceptions=True)

    async def _feed(self, send: Send) -> None:
        async def put(data: bytes) -> None:
            async with asyncio.timeout(_PATIENCE_S):  # then this viewer's place is free
                await send({"type": "http.response.body", "body": data, "more_body": True})

        await self._page.feed(put)
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _bound(page: PageConfig) -> socket.socket:
    assert page.port is not None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            page.host, page.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen()  # who comes before the loop runs waits
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"page.port {page.port} on page.host {page.host}: {error.strerror}; use a free port of this machine, 0 for "
            "any, or null"
        ) from None
    return found
