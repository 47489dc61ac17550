"""Who gets the published weights, in which group, and when a publish is complete: the decisions of the publisher.

No input, no output, and the clock is given: `learner.publisher` tells a `Membership` what the registry, the
acknowledgements and the link say, and does what `step` answers.

    REST -> FORM -> CONNECT -> UPDATE -> SEND -> COMMIT -> LOADED -> REST
      \\______(the members are those of the last group)____^
    from FORM to COMMIT: -> DISBAND -> REST when a member goes away, fails or is silent beyond the deadline
    with nothing to send, after the members have changed: REST -> FORM -> CONNECT -> REST, ahead of the next version

What it promises:

- Every step has a deadline; no group is kept with a member that the registry does not know any more.
- Whoever does not answer is left out, longer each time, and everything is sent again to the others. Where nobody in
  particular is to blame, members are served one by one until the culprit is found.
- A version counts as held by a member only when it acknowledged it with the checksum of what was sent; a member that
  went away, or came back as another process, holds nothing.
- A publish is complete when no living member lacks the version but those left out; newcomers are served afterwards,
  in a group of their own, and never keep the next version waiting.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.weightcontrol import Ack, Stage

Identity = tuple[str, str, int]  # id, host, pid: a generator that was restarted under its name is another one

_BLAMELESS = 2  # failures of nobody in particular before members are served one by one


class Step(enum.Enum):
    """What the publisher is to do."""

    REST = "rest"  # nothing to send to anybody
    WAIT = "wait"  # for acknowledgements, or for the link
    FORM = "form"  # announce group `epoch` of `members`
    CONNECT = "connect"  # the link; then `link_done`
    UPDATE = "update"  # announce what comes
    SEND = "send"  # over the link; then `link_done`
    COMMIT = "commit"  # announce that everybody has everything
    LOADED = "loaded"  # every member has loaded
    DISBAND = "disband"  # give the link up, for `reason`
    DESPAIR = "despair"  # nobody could ever be served, for `reason`: more likely a wrong setting than a sick generator


_ANSWERS: dict[Step, Stage] = {Step.FORM: "formed", Step.UPDATE: "receiving", Step.COMMIT: "loaded"}
_NEXT = {
    Step.FORM: Step.CONNECT,
    Step.CONNECT: Step.UPDATE,
    Step.UPDATE: Step.SEND,
    Step.SEND: Step.COMMIT,
    Step.COMMIT: Step.LOADED,
}


@dataclass
class Count:
    """Of the version being published: groups it took, members that loaded it, members left out on the way."""

    attempts: int = 0
    members: int = 0
    dropped: int = 0


class Membership:
    """The state machine; one thread at a time.

    Args:
        timeout_s: deadline of every step.
        clock: seconds, never going back.
        epoch: groups get the numbers above it.

    Attributes:
        version: the published one; -1 before the first.
        complete: nobody who could be served when it was published lacks it.
        epoch: the last group formed.
        members: who is in it, in rank order; empty when there is none.
        reason: why the last group was disbanded.
        next_waits: set while a newer version waits to be published: newcomers are then left to that one.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float], epoch: int) -> None:
        self.timeout_s, self.epoch, self._clock = timeout_s, epoch, clock
        self.version = -1
        self.checksum: int | None = None
        self.members: dict[str, Identity] = {}
        self.complete, self.next_waits, self.reason = True, False, ""
        self.count = Count()
        self._doing = Step.REST
        self._deadline = 0.0
        self._awaited: set[str] = set()  # whose answer the step needs
        self._link_done = False
        self._living: set[Identity] = set()
        self._holds: dict[Identity, int] = {}
        self._left_out: dict[Identity, tuple[int, float]] = {}  # failures, time of the next try
        self._corrupt: set[Identity] = set()  # sent again at once, for the first time
        self._blameless, self._ever_loaded = 0, False
        self._owed: set[Identity] | None = set()  # who has to get it before the next one; None: not looked yet
        self._tried: dict[str, Identity] = {}  # the members a group was last formed with ahead of the next version

    # --- what happened

    def publish(self, version: int, checksum: int | None = None) -> None:
        """There is a new version. Only at rest. `checksum`: what its receivers must acknowledge; may also be set before
        the next `step`."""
        assert self._doing is Step.REST, self._doing
        self.version, self.checksum, self.complete, self.next_waits = version, checksum, False, False
        self.count, self._blameless, self._corrupt, self._owed = Count(), 0, set(), None

    def look(self, living: Iterable[Identity]) -> None:
        """The registry: generators that live and follow the control stream."""
        self._living = set(living)
        self._holds = {who: version for who, version in self._holds.items() if who in self._living}
        self._left_out = {who: until for who, until in self._left_out.items() if who in self._living}
        gone = {name for name, who in self.members.items() if who not in self._living}
        if self._doing is Step.COMMIT:
            gone &= self._awaited  # the others have loaded: nothing is lost
        if gone and self._doing in _NEXT:
            self._lose(gone, f"{_listed(gone)} went away during '{self._doing.value}'")

    def acknowledged(self, ack: Ack) -> None:
        """A generator has answered; answers to earlier groups or questions count for nothing."""
        if ack.epoch != self.epoch or ack.generator not in self.members or self._doing not in _NEXT:
            return
        name, who = ack.generator, self.members[ack.generator]
        if ack.stage == "failed":
            self._lose({name}, f"{name} failed: {ack.error}")
        elif ack.stage == "corrupt" or (ack.stage == "loaded" and ack.checksum != self.checksum):
            again = who not in self._corrupt
            self._corrupt.add(who)
            text = f"{name} received other bytes than were sent (checksum {ack.checksum}, sent {self.checksum})"
            self._lose(set() if again else {name}, text)
        elif ack.stage == _ANSWERS.get(self._doing) and (ack.stage == "formed" or ack.version == self.version):
            self._awaited.discard(name)
            if ack.stage == "loaded":
                self._ever_loaded = True
                self.count.members += 1
                self._holds[who] = self.version
                self._left_out.pop(who, None)

    def link_done(self, error: str = "", late: Iterable[str] = ()) -> None:
        """The link has done its step, or failed; `late`: members known not to have come."""
        if self._doing not in (Step.CONNECT, Step.SEND):
            return  # the group was given up meanwhile
        if error:
            late = set(late)
            self._lose(late, f"'{self._doing.value}' failed: {error}", blameless=not late)
        else:
            self._link_done = True

    # --- what to do

    def step(self) -> Step:
        """What to do now; each answer but REST, WAIT and DESPAIR is given once."""
        if self._doing is Step.DISBAND:
            self._doing, self.members = Step.REST, {}
            return Step.DISBAND
        if self._doing is Step.REST:
            return self._begin()
        if self._doing is Step.FORM and self.complete and self.next_waits:
            self._lose(set(), "a newer version waits")
            return self.step()
        if self._link_done if self._doing not in _ANSWERS else not self._awaited:
            if self._doing is Step.CONNECT and self._nobody_lacks():
                self._doing = Step.REST  # the group is for the next version
                return Step.REST
            return self._enter(_NEXT[self._doing])
        if self._clock() > self._deadline:
            silent = set(self._awaited)
            text = f"no answer from {_listed(silent)}" if silent else "no end"
            self._lose(silent, f"'{self._doing.value}': {text} within {self.timeout_s:g} s", blameless=not silent)
            return self.step()
        return Step.WAIT

    def _begin(self) -> Step:
        lacking = self._lacking()
        if self._owed is None:
            self._owed = set(lacking.values())
        if not self.complete and not self._owed & set(lacking.values()):
            self.complete, self._blameless = True, 0
        if not lacking:
            self._blameless = 0
            if self._left_out and not self._ever_loaded:
                return Step.DESPAIR
            return self._form_ahead()
        if self.complete and self.next_waits:
            return Step.REST
        if self._blameless >= _BLAMELESS:
            lacking = dict([min(lacking.items())])
        self.count.attempts += 1
        if lacking == self.members:
            return self._enter(Step.UPDATE)
        self.epoch, self.members = self.epoch + 1, lacking
        return self._enter(Step.FORM)

    def _form_ahead(self) -> Step:
        """Everybody holds the version. Where the next one would need another group, form that now, while nobody waits
        for it; once for the same members, so that one who cannot come costs this once."""
        ready = {who[0]: who for who in sorted(self._living) if self._has(who)}
        if not ready or ready in (self.members, self._tried):
            return Step.REST
        self._tried = ready
        self.epoch, self.members = self.epoch + 1, ready
        return self._enter(Step.FORM)

    def _enter(self, step: Step) -> Step:
        self._doing = step
        if step is Step.LOADED:
            self._doing = Step.REST
        self._awaited = set(self.members) if step in _ANSWERS else set()
        self._link_done = False
        self._deadline = self._clock() + self.timeout_s
        return step

    def _has(self, who: Identity) -> bool:
        return self._holds.get(who) == self.version

    def _nobody_lacks(self) -> bool:
        """Everybody in the group holds the version."""
        return all(map(self._has, self.members.values()))

    def _lacking(self) -> dict[str, Identity]:
        """Living generators that do not hold the version and are not left out now, in order of their ids."""
        if self.version < 0:
            return {}
        now = self._clock()
        return {
            who[0]: who
            for who in sorted(self._living)
            if not self._has(who) and self._left_out.get(who, (0, 0.0))[1] <= now
        }

    def _lose(self, guilty: set[str], reason: str, blameless: bool = False) -> None:
        """Give the group up; leave the guilty out for a while, longer each time."""
        if blameless and self._blameless and len(self.members) == 1:
            guilty = set(self.members)
        elif blameless:
            self._blameless += 1
        for who in (self.members[name] for name in guilty):
            if who in self._living:
                failures = self._left_out.get(who, (0, 0.0))[0] + 1
                self._left_out[who] = (failures, self._clock() + self.timeout_s * 2 ** min(failures, 5))
        self.count.dropped += len(guilty)
        self._doing, self.reason = Step.DISBAND, reason


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
