"""Brings every published version to every living generator, from a thread of its own on learner rank 0.

Read `WeightPublisher._turn`: look at the registry, listen, ask `learner.membership` what to do, do it. Who is in a
group, who is left out and when a publish is complete is decided there. What is promised here:

- `publish` costs the learner one copy into the staging buffers; the broadcast runs while it trains on.
- Nobody waits for the dead: the thread never blocks for longer than a slice of a second, and what the link does runs
  in a thread of its own, which is left behind when its group is given up.
- "commit" is announced only after every member of the group has received every byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from broker import Broker
from broker.addresses import own_address
from common.config import Config
from common.errors import HeadraceError, WireError
from common.log import Logger
from common.lora import Adapter
from common.weightcontrol import Commit, Form, Update, read_ack
from common.weightwire import MissingRanksError, resolve_backend
from learner.membership import Membership, Step
from learner.staging import Staged
from learner.transport import Link, open_link

_SLICE_S = 0.2  # how often a wait looks at the registry


class PublishError(HeadraceError):
    """The weights cannot be brought to the generators."""


@dataclass(frozen=True)
class PublishTimings:
    """The delivery of a version, in seconds. `stage_s`: the copy, for which the learner waited. `load_s`: from commit
    to the last acknowledgement, pauses included. `pause_s`: the longest pause a generator reported. `settle_s`: the
    part of `send_s` after everything was received, until all were ready. `attempts`: groups it took. `dropped`: members
    left out on the way."""

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


class _Job:
    """A step of the link, in a thread: neither gloo nor NCCL can be interrupted, so one that hangs with a dead peer is
    left behind and ends with its own deadline."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"weights-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def done(self, timeout_s: float) -> bool:
        """Whether it has ended; waits for that at most so long."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


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
        self._adapter: Adapter | None = None
        self._stage_s = self._pause_s = 0.0
        self._condition = threading.Condition()
        self._resting = self._closed = False
        self._error: BaseException | None = None
        # Epochs only have to differ, also from those of the learner before this one.
        self._members = Membership(config.weights.timeout_s, time.monotonic, epoch=time.time_ns() // 1_000_000)
        self._step = Step.REST
        self._marks: dict[Step, float] = {}  # when the steps of this attempt began
        self._link: Link | None = None
        self._job: _Job | None = None
        self._ack_cursor = broker.last_ack()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    # --- the learner's side

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        wire_dtype: torch.dtype,
        adapter: Adapter | None = None,
    ) -> None:
        """Copy the weights and have them sent; returns after the copy.

        Waits for the delivery of the previous version first. The tensors are read once, in order, on the caller's
        thread, so they may be gathered while iterating; one that shares its storage with an earlier one is sent once.
        With `adapter` they are its factors, which generators add to the weights they have started with.

        Raises:
            PublishError: the previous delivery failed, or the publisher is closed.
        """
        with self._condition:
            self._members.next_waits = True
            self._condition.wait_for(lambda: (self._resting and self._members.complete) or self._broken)
            self._check()
            started = time.monotonic()
            self._staged.fill(named_tensors, wire_dtype)
            self._adapter = adapter
            self._stage_s = time.monotonic() - started
            self._members.publish(version)
            self._resting = False
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when the last published version was delivered to everybody who was there.

        Raises:
            PublishError: the delivery failed, or takes longer than `timeout_s`.
        """
        with self._condition:
            done = self._condition.wait_for(lambda: self._members.complete or self._broken, timeout_s)
            self._check()
            if not done:
                raise PublishError(f"version {self._members.version} was not delivered within {timeout_s:.0f} s")

    def close(self) -> None:
        """End the thread; a delivery under way is given up."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(self.config.weights.timeout_s)
        self._give_up()

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
        try:
            while not self._closed:
                self._turn()
        except Exception as error:
            self.log.error("weight publisher: %s", error)
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _turn(self) -> None:
        """Look, listen, decide, do."""
        members = self._members
        living = [m for m in self.broker.members("generator") if m.state in ("syncing", "serving")]
        members.look((m.id, m.host, m.pid) for m in living)
        self._listen()
        self._step = members.step()
        self._marks[self._step] = time.monotonic()
        match self._step:
            case Step.REST:
                self._rest()
            case Step.FORM:
                self._form()
            case Step.CONNECT:
                self._start(self._open_link.connect)
            case Step.UPDATE:
                update = Update(members.epoch, members.version, self._staged.parameters, self._adapter)
                self.broker.announce(update.message())
            case Step.SEND:
                link = self._open_link
                self._start(lambda: link.send(self._staged))
            case Step.COMMIT:
                self.broker.announce(Commit(members.epoch, members.version, members.checksum).message())
            case Step.LOADED:
                self._report()
            case Step.DISBAND:
                self.log.warning("weights: version %d: %s", members.version, members.reason)
                self._give_up()
                self._marks.clear()
            case Step.DESPAIR:
                raise PublishError(
                    f"no generator could be reached ({members.reason}); is weights.host ({self._host}) an "
                    "address of this machine that the generators can connect to, and weights.timeout_s "
                    f"({self.config.weights.timeout_s:g}) long enough to load the model?"
                )

    def _listen(self) -> None:
        """Tell what the link and the generators say; waits a moment for it where there is nothing else to do."""
        patience_s = _SLICE_S if self._step is Step.WAIT else 0.0
        job = self._job
        if job is not None and job.done(patience_s):
            error, self._job = job.error, None
            self._members.link_done("" if error is None else str(error) or repr(error), self._late(error))
        # Where the link has just come to an end there is something to do.
        block_ms = int(1000 * patience_s) if job is None else 0
        for entry_id, message in self.broker.acks(self._ack_cursor, block_ms):
            self._ack_cursor = entry_id
            try:
                ack = read_ack(message)
            except WireError as error:
                self.log.warning("weights: %s", error)
                continue
            self._members.acknowledged(ack)
            if ack.stage == "loaded" and ack.epoch == self._members.epoch:
                pause_s = sum(seconds for part, seconds in ack.seconds.items() if part != "stage")
                self._pause_s = max(self._pause_s, pause_s)

    def _late(self, error: BaseException | None) -> list[str]:
        """Members whose ranks did not come."""
        ranks = error.ranks if isinstance(error, MissingRanksError) else []
        names = list(self._members.members)
        return [names[(rank - 1) // self._workers] for rank in ranks]

    @property
    def _workers(self) -> int:
        """Ranks that a generator takes."""
        return self.config.generator.tensor_parallel_size

    # --- doing

    def _rest(self) -> None:
        """Until there is something to publish, or it is time to look for newcomers."""
        self._marks.clear()
        with self._condition:
            self._resting = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._resting or self._closed, self.config.broker.heartbeat_s)
            published, self._resting = not self._resting, False
        # vLLM's own nccl engine loads what it receives: there is nothing to check before.
        if published and self._backend != "nccl":
            self._members.checksum = self._staged.checksum(self._members.version)

    def _form(self) -> None:
        """Open a link for exactly the members and call them in."""
        self._give_up()
        weights, names = self.config.weights, self._members.members
        world_size = 1 + self._workers * len(names)
        self._link = open_link(self._backend, self._host, world_size, weights.timeout_s, self._staged.bucket_bytes)
        form = Form(
            epoch=self._members.epoch,
            backend=self._backend,
            host=self._host,
            port=self._link.port,
            world_size=world_size,
            ranks={name: 1 + self._workers * index for index, name in enumerate(names)},
            bucket_bytes=self._staged.bucket_bytes,
            timeout_s=weights.timeout_s,
        )
        self.broker.announce(form.message())

    @property
    def _open_link(self) -> Link:
        assert self._link is not None
        return self._link

    def _start(self, work: Callable[[], None]) -> None:
        self._job = _Job(work, self._step.value)

    def _give_up(self) -> None:
        """Close the link; what it was doing is left behind."""
        self._job = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _report(self) -> None:
        """Log a delivery; keep its timings where it was not a newcomer's."""
        members, marks, now = self._members, self._marks, time.monotonic()
        form_s = marks[Step.UPDATE] - marks.get(Step.FORM, marks[Step.UPDATE])
        send_s, load_s = marks[Step.COMMIT] - marks[Step.UPDATE], now - marks[Step.COMMIT]
        self.log.info(
            "version %d at %d generators: form %.3f s, send %.3f s, load %.3f s, paused %.3f s",
            members.version, len(members.members), form_s, send_s, load_s, self._pause_s,
        )  # fmt: skip
        if not members.complete:
            count = members.count
            self.timings = PublishTimings(
                members.version, count.members, count.attempts, count.dropped, self._staged.nbytes, self._stage_s,
                form_s, send_s, load_s, self._pause_s, self._open_link.settle_s,
            )  # fmt: skip
        self._marks.clear()
        self._pause_s = 0.0
