"""Who may see the live page: everybody on this machine, or who brings its token; and the headers of every answer."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config import Config, PageConfig
from common.errors import ConfigError
from common.log import Logger

TOKEN_VARIABLE = "HEADRACE_PAGE_TOKEN"
_TOKEN_LENGTH = 16
_COOKIE = "headrace-page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def url_file(config: Config) -> Path:
    """Where the page says its URL, which may hold a port that nobody chose."""
    return config.run.folder / "page.url"


def token_of(config: PageConfig) -> str | None:
    """The token a browser must bring; None: none.

    Raises:
        ConfigError: its file cannot be read, it is too short, or there is none and others can reach `page.host`.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    where = TOKEN_VARIABLE
    if config.token_file is not None:
        where = f"page.token_file: {config.token_file}"
        try:
            token = config.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"{where} is empty; expected at least {_TOKEN_LENGTH} characters")
    if token and (len(token) < _TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
        raise ConfigError(f"{where}: the token must be {_TOKEN_LENGTH} or more printable ASCII characters")
    if not token and not config.loopback:
        raise ConfigError(
            f"page.host: {config.host!r} can be reached by others, and there is no token; set page.token_file or "
            f"{TOKEN_VARIABLE}, or use 127.0.0.1"
        )
    return token or None


class Guard:
    """In front of everything: reading only, headers, and either the token or a name of this machine."""

    def __init__(self, inner: ASGIApp, token: str | None, log: Logger) -> None:
        self._inner, self._token, self._log = inner, token, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers, cookie = Headers(scope=scope), ""
        answer: ASGIApp = self._inner
        if scope["method"] != "GET":
            answer = PlainTextResponse("this page only reads: use GET", 405, {"Allow": "GET"})
        elif self._token is None:
            if not _local(headers.get("host", "")):
                answer = PlainTextResponse("without a token this page is at localhost only", 403)
        elif not self._admits(HTTPConnection(scope)):
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
            if _same(given, self._token):
                # Strict: another site's link brings no cookie along, and neither does its script.
                secure = "; Secure" if scope.get("scheme") == "https" else ""
                cookie = f"{_COOKIE}={_cookie(self._token)}; Path=/; HttpOnly; SameSite=Strict{secure}"
            else:
                answer = PlainTextResponse(
                    "this page needs its token: open /?token=..., or send it as a bearer", 401,
                    {"WWW-Authenticate": "Bearer"},
                )  # fmt: skip

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(_HEADERS)
                if cookie:
                    found["Set-Cookie"] = cookie
            await send(message)

        try:
            await answer(scope, receive, with_headers)
        except Exception:  # uvicorn, whose lines could hold a token, logs nothing
            self._log.exception("page: GET %s failed", scope["path"])
            raise

    def _admits(self, asked: HTTPConnection) -> bool:
        assert self._token is not None
        kind, _, bearer = asked.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(bearer.strip(), self._token):
            return True
        return _same(asked.cookies.get(_COOKIE, ""), _cookie(self._token))


def _same(given: str, wanted: str) -> bool:
    """In a time that says nothing about where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def _cookie(token: str) -> str:
    """What the cookie holds: a browser keeps it on disk, so it is not the token itself."""
    return hmac.new(token.encode(), b"headrace page", hashlib.sha256).hexdigest()


def _local(host: str) -> bool:
    """Whether `host`, with or without a port, is a name of this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name == "localhost" or PageConfig(host=name.strip("[]")).loopback
