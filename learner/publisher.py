"""Brings every published version to every living generator, from a thread of its own on learner rank 0.

Read `WeightPublisher._serve`: while somebody lacks the version, form a group of those who lack it, send, commit, wait.
What it promises:

- `publish` costs the learner one copy into the staging buffers; the broadcast runs while it trains on.
- Nobody waits for the dead, nor long for the silent: every wait watches the registry and has a deadline; who is gone
  or does not answer is left out, a new group is formed of the others, and everything is sent again.
- A generator that appears between two publishes gets the staged copy in a group of newcomers, unnoticed by the others.
- "commit" is announced only after every member of the group has received every byte.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from broker import Broker, Member
from broker.addresses import own_address
from common.config import Config
from common.errors import HeadraceError, WireError
from common.log import Logger
from common.weightcontrol import Ack, Commit, Form, Stage, Update, read_ack
from common.weightwire import MissingRanksError, resolve_backend
from learner.staging import Staged
from learner.transport import Link, open_link

_SLICE_MS = 200  # how often a wait looks at the registry
_BLAMELESS = 2  # failures of nobody in particular before members are served one by one

Identity = tuple[str, str, int]  # id, host, pid: a generator that was restarted under its name is another one


class PublishError(HeadraceError):
    """The weights cannot be brought to the generators."""


@dataclass(frozen=True)
class PublishTimings:
    """The delivery of a version, in seconds. `stage_s`: the copy, for which the learner waited. `settle_s`: the part
    of `send_s` after everything was received, until all were ready to change over. `load_s`: from commit to the last
    acknowledgement, pauses included. `pause_s`: the longest pause a generator reported. `attempts`: groups it took.
    `dropped`: members left out on the way."""

    version: int
    members: int = 0
    attempts: int = 0
    dropped: int = 0
    nbytes: int = 0
    stage_s: float = 0.0
    form_s: float = 0.0
    send_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0
    settle_s: float = 0.0


@dataclass(frozen=True)
class _Group:
    epoch: int
    members: dict[str, Identity]
    link: Link


class _Lost(Exception):
    """An attempt failed. `members`: those to leave out (empty: nobody in particular). `died`: they are gone."""

    def __init__(self, members: Iterable[str], reason: str, died: bool = False) -> None:
        super().__init__(reason)
        self.members, self.died = set(members), died


class _Interrupted(Exception):
    """A newer version waits, which newcomers will get instead; or the publisher was closed."""


class WeightPublisher:
    """The learner's end of weight updates (rank 0 only).

    Attributes:
        timings: of the last published version that was delivered; None before the first.
    """

    def __init__(self, broker: Broker, config: Config, log: Logger) -> None:
        self.broker, self.config, self.log = broker, config, log
        self.timings: PublishTimings | None = None
        self._backend = resolve_backend(config.weights.backend)
        self._host = config.weights.host or own_address(broker.url)
        self._staged = Staged(config.weights.bucket_mb << 20)
        self._version, self._stage_s = -1, 0.0
        self._condition = threading.Condition()
        self._pending = self._busy = self._waiting = self._closed = False
        self._error: BaseException | None = None
        # Epochs only have to differ, also from those of the learner before this one.
        self._epoch = time.time_ns() // 1_000_000
        self._group: _Group | None = None
        self._holds: dict[Identity, int] = {}
        self._ever_loaded = False
        self._shunned: dict[Identity, tuple[int, float]] = {}  # failures, monotonic time of the next try
        self._ack_cursor = broker.last_ack()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    # --- the learner's side

    def publish(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: torch.dtype
    ) -> None:
        """Copy the weights and have them sent; returns after the copy.

        Waits for the delivery of the previous version first. The tensors are read once, in order, on the caller's
        thread, so they may be gathered while iterating; one that shares its storage with an earlier one is sent once.

        Raises:
            PublishError: the previous delivery failed, or the publisher is closed.
        """
        with self._condition:
            self._waiting = True
            self._condition.wait_for(lambda: not (self._pending or self._busy) or self._broken)
            self._waiting = False
            self._check()
            started = time.monotonic()
            self._staged.fill(named_tensors, wire_dtype)
            self._stage_s = time.monotonic() - started
            self._version, self._pending = version, True
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when the last published version was delivered to everybody who was there.

        Raises:
            PublishError: the delivery failed, or takes longer than `timeout_s`.
        """
        with self._condition:
            done = self._condition.wait_for(lambda: not self._pending or self._broken, timeout_s)
            self._check()
            if not done:
                raise PublishError(f"version {self._version} was not delivered within {timeout_s:.0f} s")

    def close(self) -> None:
        """End the thread; a delivery under way is given up."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(self.config.weights.timeout_s)
        self._leave_group()

    @property
    def _broken(self) -> bool:
        return self._closed or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise PublishError(f"weights could not be published: {self._error}") from self._error
        if self._closed:
            raise PublishError("the weight publisher is closed")

    # --- the thread

    def _run(self) -> None:
        """Deliver what is pending; between publishes look for newcomers at the pace of heartbeats."""
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._pending or self._closed, self.config.broker.heartbeat_s)
                    if self._closed:
                        return
                    if self._version < 0 or (self._waiting and not self._pending):
                        continue
                    self._busy = True
                self._serve()
                with self._condition:
                    self._busy = self._pending = False
                    self._condition.notify_all()
        except _Interrupted:
            return
        except Exception as error:
            self.log.error("weight publisher: %s", error)
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _serve(self) -> None:
        """Bring the version to all who lack it; ends with nobody lacking it, or all that do left out for a while."""
        timings = PublishTimings(self._version, nbytes=self._staged.nbytes, stage_s=self._stage_s)
        blameless = 0
        while members := self._lacking():
            if blameless >= _BLAMELESS:
                members = dict([min(members.items())])
            timings = replace(timings, attempts=timings.attempts + 1)
            try:
                timings = self._attempt(members, timings)
            except _Lost as lost:
                self._leave_group()
                guilty = lost.members or (set(members) if len(members) == 1 and blameless else set())
                blameless += not guilty
                timings = replace(timings, dropped=timings.dropped + len(guilty))
                self._shun({members[name] for name in guilty}, lost)
            except _Interrupted:
                self._leave_group()
                if self._closed:
                    raise
                return
        if self._pending:
            self.timings = timings

    def _lacking(self) -> dict[str, Identity]:
        """Living generators that follow the control stream, do not hold the version, and are not left out now."""
        now = time.monotonic()
        living = [_identity(m) for m in self.broker.members("generator") if m.state in ("syncing", "serving")]
        self._holds = {who: version for who, version in self._holds.items() if who in living}
        self._shunned = {who: until for who, until in self._shunned.items() if who in living}
        return {
            who[0]: who
            for who in living
            if self._holds.get(who) != self._version and self._shunned.get(who, (0, 0.0))[1] <= now
        }

    def _shun(self, guilty: set[Identity], lost: _Lost) -> None:
        """Leave members out for a while, longer each time."""
        self.log.warning("weights: version %d: %s", self._version, lost)
        for who in guilty:
            failures = self._shunned.get(who, (0, 0.0))[0] + 1
            seconds = self.config.weights.timeout_s * 2 ** min(failures, 5)
            self._shunned[who] = (failures, time.monotonic() + seconds)
        if guilty and not lost.died and not self._ever_loaded and not self._lacking():
            # Nothing ever worked: more likely a wrong setting than a sick generator.
            raise PublishError(
                f"no generator could be reached ({lost}); is weights.host ({self._host}) an address of "
                "this machine that the generators can connect to, and weights.timeout_s "
                f"({self.config.weights.timeout_s:g}) long enough to load the model?"
            )

    def _attempt(self, members: dict[str, Identity], timings: PublishTimings) -> PublishTimings:
        """Form (if the set changed), send, commit; raises _Lost where that fails."""
        marks = [time.monotonic()]
        group = self._form(members)
        marks.append(time.monotonic())
        self.broker.announce(Update(group.epoch, self._version, self._staged.parameters).message())
        self._collect(group, "receiving")
        self._watched(lambda: group.link.send(self._staged), group, "sending")
        marks.append(time.monotonic())
        self.broker.announce(Commit(group.epoch, self._version).message())
        acks = self._collect(group, "loaded", on_ack=lambda ack: self._loaded(members[ack.generator]))
        marks.append(time.monotonic())
        form_s, send_s, load_s = (b - a for a, b in itertools.pairwise(marks))
        pause_s = max(sum(seconds for part, seconds in ack.seconds.items() if part != "stage") for ack in acks)
        text = "version %d at %d generators: form %.3f s, send %.3f s, load %.3f s, paused %.3f s"
        self.log.info(text, self._version, len(acks), form_s, send_s, load_s, pause_s)
        timings = replace(timings, members=timings.members + len(acks), settle_s=group.link.settle_s)
        return replace(timings, form_s=form_s, send_s=send_s, load_s=load_s, pause_s=pause_s)

    def _loaded(self, who: Identity) -> None:
        self._ever_loaded = True
        self._holds[who] = self._version
        self._shunned.pop(who, None)

    def _form(self, members: dict[str, Identity]) -> _Group:
        """The group of exactly these members: the last one, or a new one."""
        if self._group is not None and self._group.members == members:
            return self._group
        self._leave_group()
        weights, bucket_bytes = self.config.weights, self._staged.bucket_bytes
        world_size = 1 + self._workers * len(members)
        self._epoch += 1
        link = open_link(self._backend, self._host, world_size, weights.timeout_s, bucket_bytes)
        group = self._group = _Group(self._epoch, members, link)
        form = Form(
            epoch=group.epoch,
            backend=self._backend,
            host=self._host,
            port=link.port,
            world_size=world_size,
            ranks={name: 1 + self._workers * index for index, name in enumerate(members)},
            bucket_bytes=bucket_bytes,
            timeout_s=weights.timeout_s,
        )
        self.broker.announce(form.message())
        self._collect(group, "formed")
        self._watched(link.connect, group, "connecting")
        return group

    @property
    def _workers(self) -> int:
        """Ranks that a generator takes."""
        return self.config.generator.tensor_parallel_size

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.link.close()
            self._group = None

    # --- waiting

    def _collect(self, group: _Group, stage: Stage, on_ack: Callable[[Ack], None] | None = None) -> list[Ack]:
        """The acknowledgements of `stage` from all members, in order of arrival.

        Raises:
            _Lost: a member died, says that it failed, or is silent beyond the deadline.
        """
        deadline = time.monotonic() + self.config.weights.timeout_s
        acks: dict[str, Ack] = {}
        while True:
            for ack in self._read_acks(group, _SLICE_MS):
                if ack.stage == stage and ack.generator not in acks:
                    acks[ack.generator] = ack
                    if on_ack is not None:
                        on_ack(ack)
            missing = group.members.keys() - acks.keys()
            if not missing:
                return list(acks.values())
            if time.monotonic() > deadline:
                raise _Lost(missing, f"no answer '{stage}' from {', '.join(sorted(missing))}")
            self._check_alive(group, missing, stage)
            if stage == "formed" and self._waiting and not self._pending:
                raise _Interrupted  # newcomers that do not answer must not keep a new version waiting

    def _watched(self, job: Callable[[], None], group: _Group, what: str) -> None:
        """Run a blocking step of the link, but not longer than the members live: neither gloo nor NCCL can be
        interrupted, so its thread is left behind and ends with its own deadline."""
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                job()
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name=f"weights-{what}", daemon=True)
        thread.start()
        deadline = time.monotonic() + self.config.weights.timeout_s
        thread.join(_SLICE_MS / 1000)
        while thread.is_alive():
            self._read_acks(group, 1)
            self._check_alive(group, group.members, what)
            if time.monotonic() > deadline:
                raise _Lost((), f"{what} took longer than {self.config.weights.timeout_s:.0f} s (weights.timeout_s)")
            thread.join(_SLICE_MS / 1000)
        error = outcome[0]
        if error is not None:
            self._check_alive(group, group.members, what)
            late = error.ranks if isinstance(error, MissingRanksError) else []
            names = list(group.members)
            raise _Lost({names[(rank - 1) // self._workers] for rank in late}, f"{what} failed: {error}")

    def _read_acks(self, group: _Group, block_ms: int) -> list[Ack]:
        """What has arrived for this group; raises _Lost where a member says that it failed."""
        out = []
        for entry_id, message in self.broker.acks(self._ack_cursor, block_ms):
            self._ack_cursor = entry_id
            try:
                ack = read_ack(message)
            except WireError as error:
                self.log.warning("weights: %s", error)
                continue
            if ack.epoch != group.epoch or ack.generator not in group.members:
                continue
            if ack.stage == "failed":
                raise _Lost({ack.generator}, f"{ack.generator} failed: {ack.error}")
            out.append(ack)
        return out

    def _check_alive(self, group: _Group, names: Iterable[str], what: str) -> None:
        if self._closed:
            raise _Interrupted
        living = {_identity(m) for m in self.broker.members("generator") if m.state != "draining"}
        gone = {name for name in names if group.members[name] not in living}
        if gone:
            raise _Lost(gone, f"{', '.join(sorted(gone))} went away while {what}", died=True)


def _identity(member: Member) -> Identity:
    return member.id, member.host, member.pid
