"""The feeder: releases prompts of the source, in order, as far as the release budget allows.

Where it is in the source is kept in Redis and moves in the same step as the release, so a feeder that dies, or two at
once, release no prompt twice and skip none. The group id is the position, `f"{position:09d}"`.
"""

from __future__ import annotations

import threading

from broker.budget import may_release
from broker.sources import Source
from broker.store import Broker
from common.log import Logger
from common.trajectory import Prompt

# Prompts per release: bounds the time one script holds the server.
_BATCH = 64
# How soon a stop is noticed while nothing happens.
_WAIT_MS = 500


class Feeder:
    """Feeds one run from one source."""

    def __init__(self, broker: Broker, source: Source, log: Logger) -> None:
        self._broker, self._source, self._log = broker, source, log
        self.released = 0

    def feed(self) -> int:
        """Release what the budget allows now, up to a batch. Returns how many prompts that was."""
        config = self._broker.config
        allowed = min(_BATCH, may_release(self._broker.ledger(), config))
        if allowed == 0:
            return 0
        position, version = self._broker.position(), self._broker.version()
        prompts = [self._prompt(each, version) for each in range(position, position + allowed)]
        if not self._broker.release(prompts, position, config.max_outstanding):
            return 0
        self.released += allowed
        return allowed

    def run(self, stopping: threading.Event) -> None:
        """Feed until `stopping`, woken by events."""
        seen = "0"
        while not stopping.is_set():
            # What happens from here on is an event after `seen`: nothing can be missed between looking and waiting.
            while self.feed() and not stopping.is_set():
                pass
            seen = self._broker.wait_event(seen, _WAIT_MS)

    def _prompt(self, position: int, version: int) -> Prompt:
        sourced = self._source[position]
        return Prompt(
            group_id=f"{position:09d}",
            token_ids=sourced.token_ids,
            text=sourced.text,
            columns=sourced.columns,
            released_version=version,
        )
