"""Dead letters: what was given up, to be looked at, put back for sampling or forgotten.

Promise: the ledger balances through all of it. Putting one back makes it outstanding and not dead any more, in one step
and once; forgetting one leaves it counted as dead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from broker.link import Link
from broker.records import DeadLetter
from common import wire
from common.errors import HeadraceError, WireError
from common.trajectory import Prompt


class DeadLetters(Link):
    """Methods of `Broker` around the `dead` stream."""

    def dead_letters(self, limit: int | None = 10) -> list[DeadLetter]:
        """The newest dead letters, newest first; all that are kept (about 1000) with a `limit` of None."""
        entries = self._call(lambda: self._client.xrevrange(self.keys.dead, count=limit))
        now_ms = time.time_ns() // 1_000_000
        return [_letter(entry_id.decode(), values, now_ms) for entry_id, values in entries]

    def retry_dead(self, letter: DeadLetter) -> bool:
        """Put a dead letter's prompt back for sampling, released at the current version, its attempts forgotten.

        Returns:
            False: there is no such dead letter any more; nothing was written.

        Raises:
            HeadraceError: it holds no prompt that could be sampled.
        """
        if letter.prompt is None or letter.kind == "foreign":
            raise HeadraceError(
                f"dead letter {letter.id} is {letter.kind} and holds no prompt that could be sampled; drop it"
            )
        version = int(self._call(lambda: self._client.hget(self.keys.state, "version")) or 0)
        prompt = wire.encode_prompt(replace(letter.prompt, attempt=0, released_version=version))
        return self._end_letter(letter, "retried", version, prompt)

    def drop_dead(self, letter: DeadLetter) -> bool:
        """Forget a dead letter; the ledger goes on counting it as dead. Returns as `retry_dead`."""
        return self._end_letter(letter, "dropped", 0, b"")

    def _end_letter(self, letter: DeadLetter, action: str, version: int, prompt: bytes) -> bool:
        k = self.keys
        keys = [k.prompts, k.dead, k.ledger, k.closed, k.outstanding]
        return bool(self._run("letter", keys, [letter.entry_id, action, letter.group_id, version, prompt]))


def _letter(entry_id: str, values: Mapping[bytes, bytes], now_ms: int) -> DeadLetter:
    def text(name: bytes) -> str:
        return values.get(name, b"").decode(errors="replace")

    prompt: Prompt | None
    try:
        prompt = wire.decode_prompt(values.get(b"q") or values.get(b"p", b""))
    except WireError:
        prompt = None
    return DeadLetter(
        entry_id=entry_id,
        group_id=text(b"g"),
        kind=text(b"kind"),
        error=text(b"error"),
        generator=text(b"c") or text(b"by"),
        attempts=0 if prompt is None else prompt.attempt + 1,
        age_s=max(0, now_ms - int(entry_id.split("-")[0])) / 1000,
        prompt=prompt,
    )
