"""When a checkpoint or a snapshot is due, and the thread that writes it while the learner trains on.

A snapshot is a checkpoint in another folder, more often and with another retention. The step pays for the copy into
host memory only; the thread writes, syncs and renames. One save is under way at a time, hence never more than one
copy: what falls due meanwhile is taken when the writer is free. A save that fails (disk full, read-only folder) is
logged and costs nothing but itself: the previous one stays, groups stay unsettled, the next that is due tries again.
Nothing here imports torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import Config
from common.log import Logger
from learner import checkpoint
from learner.checkpoint import Folder, State

# After a failure nothing is saved out of turn for so long.
_REST_S = 10.0

Kind = Literal["checkpoint", "snapshot"]


@dataclass(frozen=True)
class Saved:
    """How a save ended. `error`: why it failed, None where it is durable."""

    kind: Kind
    state: State
    error: OSError | None


class Saver:
    """Rank 0's end of saving; used by one thread.

    Args:
        config: the run.
        log: where failures go.
        hold: raises FencedError where this learner was replaced.
        checkpointed: the version of which no checkpoint is needed any more; -1: every one is.

    Attributes:
        checkpointed: the same, as it goes on.
    """

    def __init__(self, config: Config, log: Logger, hold: Callable[[], None], checkpointed: int = -1) -> None:
        self._log, self._hold = log, hold
        learner = config.learner
        checkpoints, snapshots = config.save_folders
        self._every: dict[Kind, int] = {"checkpoint": learner.checkpoint_every, "snapshot": learner.snapshot_every}
        self._roots: dict[Kind, Path] = {"checkpoint": checkpoints, "snapshot": snapshots}
        self._keep: dict[Kind, int] = {"checkpoint": learner.keep_checkpoints, "snapshot": learner.keep_snapshots}
        self._due: Kind | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._rest_until = 0.0
        self.checkpointed = checkpointed

    @property
    def busy(self) -> bool:
        """Whether a save is under way, or its end was not looked at."""
        return self._thread is not None

    @property
    def resting(self) -> bool:
        """Whether nothing should be saved out of turn: the writer is busy, or has just failed."""
        return self.busy or time.monotonic() < self._rest_until

    def due(self, version: int) -> Kind | None:
        """What is to be saved at `version`, asked once for every version in turn; None: nothing, or not yet."""
        for kind, every in self._every.items():
            if every and version % every == 0 and self._due != "checkpoint":
                self._due = kind
        return None if self.busy else self._due

    def start(self, kind: Kind, state: State, fill: Callable[[Folder], None]) -> None:
        """Write a checkpoint in the background; `fill` writes its files. Not while `busy`."""
        self._due = None
        self._thread = threading.Thread(target=self._write, args=(kind, state, fill), name="saver", daemon=True)
        self._thread.start()

    def ended(self, wait_s: float = 0.0) -> Saved | None:
        """The save that has ended since the last call, if one has; waits for the one under way at most `wait_s`.

        Raises:
            FencedError: this learner was replaced.
            HeadraceError: the broker was gone for longer than its deadline.
        """
        if self._thread is None:
            return None
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return None
        outcome, self._thread = self._outcome, None
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome.error is not None:
            self._rest_until = time.monotonic() + _REST_S
        elif outcome.kind == "checkpoint":
            self.checkpointed = outcome.state.version
        return outcome

    def _write(self, kind: Kind, state: State, fill: Callable[[Folder], None]) -> None:
        started, root = time.monotonic(), self._roots[kind]
        try:
            try:
                folder = checkpoint.save(root, state, fill, self._keep[kind], self._hold)
                self._log.info("%s %s in %.1f s", kind, folder, time.monotonic() - started)
                self._outcome = Saved(kind, state, None)
            except OSError as error:
                self._hold()  # a successor tidies up after us: then that is what is wrong
                self._log.error(
                    "%s of version %d under %s failed: %s; the one before it stays", kind, state.version, root, error
                )
                self._outcome = Saved(kind, state, error)
        except BaseException as error:  # raised by `ended`
            self._outcome = error
