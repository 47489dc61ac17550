"""Back-pressure, as one process sees it: since when the server takes nothing more, and for how long in all."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable

from common.errors import HeadraceError

# Near the limit a small entry fits where a large one does not: without a refusal for so long, it is over.
QUIET_S = 5.0
_WAIT_S = (0.25, 0.75)

_log = logging.getLogger("headrace.broker")


class BrokerFullError(HeadraceError):
    """The server is at its memory limit, or the groups at `broker.max_bytes`. Releasing and submitting wait; reading,
    taking, settling and every other way out still work."""


async def until_taken(submit: Callable[[], bool]) -> bool:
    """What `submit` returns, once the server has room for what it brings.

    It waits on the loop and not in a thread: heartbeats, which keep the lease meanwhile, need theirs.
    """
    while True:
        try:
            return await asyncio.to_thread(submit)
        except BrokerFullError:
            await asyncio.sleep(random.uniform(*_WAIT_S))


class Pressure:
    """One line when the server begins to refuse what adds to it, one when it takes it again. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._first: float | None = None  # refusal of the present spell
        self._last = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Seconds the server was full: from the first refusal of each spell to its last, the present one included."""
        with self._lock:
            return self._before + (self._last - self._first if self._first is not None else 0.0)

    def refused(self, why: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            begins = self._first is None
            if begins:
                self._first = self._last
        if begins:
            _log.warning("broker %s: full, producers wait: %s", self._url, why)

    def accepted(self) -> None:
        with self._lock:
            if self._first is None or time.monotonic() - self._last < QUIET_S:
                return
            lasted, self._first = self._last - self._first, None
            self._before += lasted
        _log.warning("broker %s: takes prompts and groups again; it was full for %.1f s", self._url, lasted)
