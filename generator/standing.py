"""Where a generator stands in its run: which state it is in, which version it holds, which update it may apply.

    joining    it does not follow the control stream yet
    syncing    it follows, but does not hold the version that was sent last: it takes no prompts
    serving    it holds that version and has said so
    draining   it takes no more prompts, for good, and is in no weight group
    (gone      it has left the registry)

No input and no output: `generator.updates` tells it every control message and does what it answers. What it promises:
prompts are taken in "serving" only; `version` is one whose load was acknowledged, never one that was only announced.
"""

from __future__ import annotations

from broker.records import MemberState
from common.weightcontrol import Commit, Form, Update


class Standing:
    """The state machine.

    Attributes:
        state: see above.
        version: the last one loaded and acknowledged; -1 before the first.
        epoch: the group this generator belongs to; 0 before the first.
        staged: the version that is on its way into the staging buffers; None when there is none.
    """

    def __init__(self, generator_id: str) -> None:
        self.generator_id = generator_id
        self.state: MemberState = "joining"
        self.version, self.epoch = -1, 0
        self.staged: int | None = None

    def follow(self) -> None:
        """It reads the control stream from now on; the learner may send."""
        self._to("syncing")

    def formed(self, form: Form) -> bool:
        """A group comes together, and every earlier one is over. True: this generator is to join it."""
        self._give_up()
        mine = self.generator_id in form.ranks and self.state != "draining"
        self.epoch = form.epoch if mine else 0
        return mine

    def announced(self, update: Update) -> bool:
        """Weights follow. True: receive them."""
        if update.epoch != self.epoch or self.state == "draining":
            return False
        self._give_up()
        self.staged = update.version
        return True

    def committed(self, commit: Commit) -> bool:
        """Everybody in the group has everything. True: load it; what was not received here has been missed."""
        if commit.epoch == self.epoch and commit.version == self.staged and self.state != "draining":
            return True
        if commit.version != self.version:
            self._to("syncing")
        return False

    def loaded(self) -> None:
        """The staged version is in the engine, and that was acknowledged."""
        assert self.staged is not None
        self.version, self.staged = self.staged, None
        self._to("serving")

    def corrupt(self) -> None:
        """What was received is not what was sent: it was not loaded."""
        self._give_up()

    def drain(self) -> None:
        """Take nothing more."""
        self._to("draining")

    def _give_up(self) -> None:
        """An update under way was abandoned: this generator has missed it."""
        if self.staged is not None:
            self.staged = None
            self._to("syncing")

    def _to(self, state: MemberState) -> None:
        if self.state != "draining":
            self.state = state
