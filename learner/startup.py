"""What it takes from the start of a rank's process to its first step, by parts: what a restart or a resize costs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.log import Logger
from learner.zero import import_deepspeed


def process_age_s() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def import_all() -> None:
    """Import what takes longest and is otherwise imported when it is used."""
    import_deepspeed()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


class Startup:
    """Marks on the way; nothing more once `done`. To be made when everything is imported."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._parts = {"imports": process_age_s()}
        self._done = False

    def mark(self, part: str) -> None:
        """What happened since the last mark was `part`. Of a part that is marked again the seconds add up."""
        if not self._done:
            now = time.monotonic()
            self._parts[part] = self._parts.get(part, 0.0) + now - self._last
            self._last = now

    def done(self, log: Logger) -> None:
        """The first step is done: say what it took, once."""
        if not self._done:
            self._done = True
            parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._parts.items())
            log.info("first step %.1f s after the start: %s", sum(self._parts.values()), parts)
