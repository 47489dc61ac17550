"""Whether a process lives and whether it may be given work, as probes ask it.

`live` is progress, not existence: it fails while the process loads (a startup probe waits for it) and when nothing has
moved for `stalled_s`. `ready` says that the process does now what it is there for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A probe's answer, and its reason in words."""

    ok: bool
    reason: str


class Health:
    """The health of this process; its parts report to it from any thread.

    Args:
        stalled_s: seconds without progress after which the process counts as stuck.
        clock: monotonic seconds.
    """

    def __init__(self, stalled_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stalled_s, self._clock = stalled_s, clock
        self._moved: float | None = None
        self._unready: Callable[[], str] = lambda: "loading"

    def beat(self) -> None:
        """Progress was made; the first time: what takes long to load is loaded."""
        self._moved = self._clock()

    def ready_when(self, unready: Callable[[], str]) -> None:
        """From now on `unready` says why the process is not ready; an empty string: it is."""
        self._unready = unready

    @property
    def live(self) -> Verdict:
        if self._moved is None:
            return Verdict(False, "loading")
        idle = self._clock() - self._moved
        if idle > self._stalled_s:
            return Verdict(False, f"no progress for {idle:.0f} s (metrics.stalled_s {self._stalled_s:g})")
        return Verdict(True, f"last progress {idle:.1f} s ago")

    @property
    def ready(self) -> Verdict:
        if not (live := self.live).ok:
            return live
        reason = self._unready()
        return Verdict(not reason, reason or "ready")
