"""The learner: take a batch, train on it, publish, report, now and then make it durable.

Read `Learner._lead` and you have read the learner; the other ranks (`_follow`) do the same work on their share. What it
promises:

- no token older than `staleness.max_staleness` versions enters an optimizer step;
- the policy version goes up by one per batch, and weights are on their way to the generators before anything else
  happens after the step;
- saving costs a step the copy into host memory (`learner.saving`); a save that fails does not end the run;
- groups are acknowledged to the broker only when a snapshot or checkpoint that contains their effect is durable, and it
  carries the ids of those that were not yet acknowledged when it was made (`learner.settling`);
- a resumed learner goes on from the newest whole snapshot or checkpoint, at any number of ranks (`learner.resuming`);
- when one rank is told to stop, all stop after the step, with what was trained durable; an elastic learner then goes on
  with the ranks there are (`learner.node`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from broker import Broker, Member
from common import environment, wire
from common.config import Config
from common.errors import HeadraceError
from common.log import Logger
from common.metrics import JsonlSink, MetricSink
from common.trackers import Target
from common.tracking import Trackers
from learner import choices, ranks, resuming
from learner.batch import Step, any_too_old, build_step, split_groups
from learner.checkpoint import State
from learner.collector import Batch, Collector
from learner.exposed import Exposed
from learner.packing import Packed, plan
from learner.pressed import Pressed
from learner.publisher import PublishError, WeightPublisher
from learner.report import Reporter
from learner.saving import Kind, Saved, Saver
from learner.settling import Settling
from learner.startup import Startup
from learner.trainer import Trainer, UpdateResult
from learner.utilisation import Plan, mfu, padding_share, peak_tflops


@dataclass(frozen=True)
class Share:
    """What rank 0 tells a rank to do: `wait`, `stop`, or `train` on its packs (a list per optimizer update)."""

    action: str
    updates: tuple[tuple[Packed, ...], ...] = ()
    save: bool = False

    def to_bytes(self) -> bytes:
        updates = [[pack.to_bytes() for pack in packs] for packs in self.updates]
        return wire.pack("share", {"do": self.action, "updates": updates, "save": self.save})

    @classmethod
    def from_bytes(cls, data: bytes) -> Share:
        message = wire.unpack(data, "share")
        updates = tuple(tuple(Packed.from_bytes(pack) for pack in packs) for packs in message["updates"])
        return cls(message["do"], updates, message["save"])


class Learner:
    """One rank of the learner."""

    def __init__(self, config: Config, log: Logger, resume: bool) -> None:
        self.config, self.log = config, log
        self.stopping = threading.Event()
        self.version = 0
        self._durable = 0  # the newest version that is saved
        self._checkpointed = True  # whether this version needs no checkpoint: it is one, or the model
        self._resume = resume
        self._elastic = config.learner.elastic is not None
        self._startup = Startup()
        self.exposed = Exposed(config)

    @property
    def complete(self) -> bool:
        return self.version >= self.config.learner.max_steps

    def run(self) -> bool:
        """Train until `max_steps`, or until a rank gets SIGTERM; both end with everything saved. Returns whether the
        run is complete."""
        with self.exposed:
            return self._run()

    def _run(self) -> bool:
        ranks.init("nccl" if torch.cuda.is_available() else "gloo")
        self._startup.mark("group")
        self.trainer = Trainer(self.config)
        self._startup.mark("model")
        restored = self._restore() if self._resume else None
        self._startup.mark("checkpoint")
        self.log.version = str(self.version)
        self.log.info("model and optimizer ready at version %d, %d ranks", self.version, dist.get_world_size())
        if dist.get_rank() == 0:
            self.log.info("computing with %s", choices.chosen(self.config))
        # Until here there is nothing that SIGTERM could lose.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        if dist.get_rank() == 0:
            self._begin(restored)
        if self._resume:
            resuming.require_newest(self.config.save_folders, restored)
        if dist.get_rank() == 0:
            self._lead(restored)
        else:
            self._follow()
        dist.destroy_process_group()
        return self.complete

    # --- every rank

    def _restore(self) -> State | None:
        """Load the newest whole snapshot or checkpoint."""
        stored = resuming.choose(self.config.save_folders, self.log)
        if stored is None:
            self.log.warning("no checkpoint under %s or %s: starting from the model", *self.config.save_folders)
            return None
        self.trainer.load(stored)
        self.version = self._durable = stored.state.version
        self._checkpointed = Path(stored.name).parent == self.config.save_folders[0]
        now, then = dist.get_world_size(), stored.state.ranks
        self.log.info("resuming from %s%s", stored.name, f", made by {then} ranks" if now != then else "")
        return stored.state

    def _train(self, share: Share) -> list[UpdateResult]:
        """The optimizer updates of one batch on this rank's packs; without a single trained token the version stays."""
        with self.exposed.phase("training"):
            results = self.trainer.train(share.updates, self.version + 1)
        self.version += any(result.metrics.tokens for result in results)
        self.log.version = str(self.version)
        return results

    def _heed(self) -> None:
        """Everybody is told to stop when one rank is. Every rank calls it after each share."""
        if ranks.anybody(self.stopping.is_set()):
            self.stopping.set()

    def _follow(self) -> None:
        self._publish(None)
        self.exposed.serving()
        while True:
            self.exposed.health.beat()
            share, before = Share.from_bytes(ranks.scatter(None)), self.version
            self._heed()
            if share.action == "train":
                self._train(share)
                if self.version == before:
                    continue
                self._publish(None)
            if share.save:
                self.trainer.capture()
            if share.action == "stop":
                return

    def _publish(self, publisher: WeightPublisher | None) -> float:
        """Hand the weights to the publisher (rank 0); under ZeRO-3 the others take part in gathering. Seconds taken."""
        started = time.monotonic()
        with self.exposed.phase("publishing"):
            if publisher is not None:
                adapter = self.trainer.sends
                # Small enough to be sent as they were trained; what the generators add them to is of their own type.
                dtype = self.config.generator.dtype if adapter is None else self.config.learner.dtype
                publisher.publish(self.version, self.trainer.published(), getattr(torch, dtype), adapter)
            elif self.config.learner.zero_stage == 3:
                for _ in self.trainer.published():
                    pass
        return time.monotonic() - started

    # --- rank 0

    def _begin(self, restored: State | None) -> None:
        self.broker = Broker.connect(self.config)
        self.epoch = self.broker.begin(self.version, restored.groups if restored is not None else ())
        self.log.info("learner epoch %d begins", self.epoch)
        known, position = restored.position if restored is not None else 0, self.broker.position()
        if position < known:
            self.log.warning("the broker lost data: %d prompts released, %d when this was saved", position, known)

    def _lead(self, restored: State | None) -> None:
        broker, epoch = self.broker, self.epoch
        publisher = WeightPublisher(broker, self.config, self.log)
        collector = Collector(broker, epoch, self.config)
        threading.Thread(target=self._heartbeat, args=(broker, epoch), daemon=True).start()
        trackers = Trackers(Target(self.config, "train", self.version + 1, environment.code()), self.log)
        sinks: list[MetricSink] = [JsonlSink(self.config.run.folder / "metrics.jsonl"), trackers, self.exposed]
        self.exposed.publisher = publisher
        self.reporter = reporter = Reporter(
            self.config, broker, sinks, self.log, restored.counters if restored is not None else {}
        )
        self.settling = Settling(broker, epoch, self.config, restored.groups if restored is not None else ())
        checkpointed = self.version if self._checkpointed else -1
        self.saver, pressed = Saver(self.config, self.log, lambda: broker.hold(epoch), checkpointed), Pressed(broker)
        try:
            self._publish(publisher)
            self._startup.mark("weights")
            self.exposed.serving()
            while not self.complete and not self.stopping.is_set():
                self.exposed.health.beat()
                self._settle()
                # With something to settle, look often whether a save has ended, or producers wait for room; an elastic
                # learner, whether a rank was told to leave.
                soon = self._elastic or not self.settling.all_settled
                idle_s = self.config.broker.heartbeat_s if soon else ranks.IDLE_S
                batch = collector.next(self.version, min(idle_s, ranks.IDLE_S), self.stopping)
                early = self._early(pressed)
                if batch is None:
                    reporter.waiting()
                    self._tell([Share("wait", save=early is not None)] * dist.get_world_size())
                    if early is not None:
                        self._save(early)
                    continue
                steps = self._build(batch)
                if not steps:
                    self._skip(broker, epoch, batch)
                    continue
                before, kind = self.version, self.saver.due(self.version + 1) or early
                self._startup.mark("batch")
                started = time.time()
                plans = self._plan(steps)
                results = self._train(self._tell(self._shares(plans, kind is not None)))
                self._log_nonfinite(steps, results)
                reporter.updates(results)
                if self.version == before:
                    self._skip(broker, epoch, batch)
                    continue
                self._startup.mark("step")
                self._startup.done(self.log)
                publish_s = self._publish(publisher)
                self.settling.trained(self.version, batch)
                reporter.step(self.version, batch, steps, results, started, publish_s, self._used(plans, results))
                if kind is not None:
                    self._save(kind)
            self._finish(publisher)
        finally:
            collector.close()
            publisher.close()
            for sink in sinks:
                sink.close()

    def _log_nonfinite(self, steps: list[Step], results: list[UpdateResult]) -> None:
        """Say which groups were in an update that was left out because its loss or gradient were not finite."""
        for step, result in zip(steps, results, strict=True):
            ids = ", ".join(group.group_id for group in step.groups)
            if result.nonfinite:
                self.log.error("loss or gradient not finite: update left out, weights kept; its groups: %s", ids)
            if result.critic is not None and result.critic.nonfinite:
                self.log.error("value loss or its gradient not finite: critic's update left out; its groups: %s", ids)

    def _skip(self, broker: Broker, epoch: int, batch: Batch) -> None:
        """The batch trained nothing. Groups that hold old tokens are sampled again; the others would be the same."""
        self.log.warning("the batch trained nothing: step skipped, %d groups expired", len(batch.deliveries))
        for each in batch.deliveries:
            old = any_too_old(each.group, self.config, self.version)
            (broker.expire if old else broker.discard)(epoch, [each])

    def _build(self, batch: Batch) -> list[Step]:
        """The optimizer steps of a batch: mini-batches of whole groups; one without a trainable token is left out."""
        groups = [delivery.group for delivery in batch.deliveries]
        parts = split_groups(groups, self.config.learner.updates_per_batch)
        steps = [build_step(part, self.config, self.version) for part in parts]
        return [step for step in steps if step.tokens]

    def _plan(self, steps: list[Step]) -> list[Plan]:
        """Of every optimizer step the rows of each rank, or of ranks that share them."""
        count = dist.get_world_size() // self.config.learner.sequence_parallel
        return [plan(step, count, self.config.learner.row_tokens) for step in steps]

    def _shares(self, plans: list[Plan], save: bool) -> list[Share]:
        """One share per rank: for every optimizer step its packs, the same for those that share rows."""
        world, together = dist.get_world_size(), self.config.learner.sequence_parallel
        return [
            Share("train", tuple(tuple(packs[rank // together]) for packs in plans), save) for rank in range(world)
        ]

    def _used(self, plans: list[Plan], results: list[UpdateResult]) -> dict[str, float]:
        """How well the ranks' time was used."""
        used = {"padding_share": padding_share(plans)}
        if (work := self.trainer.work) is not None and (peak := peak_tflops(self.config.learner)) is not None:
            device_s = sum(result.seconds for result in results) * dist.get_world_size()
            used["mfu"] = mfu(work, plans, device_s, peak)
        return used

    def _tell(self, shares: list[Share]) -> Share:
        """Send every rank its share; rank 0's own comes back."""
        ranks.scatter([share.to_bytes() for share in shares])
        self._heed()
        return shares[0]

    def _early(self, pressed: Pressed) -> Kind | None:
        """What to save out of turn: the broker is full, and what is trained but not settled takes its room."""
        if not pressed.now() or self.settling.all_settled or self.saver.resting:
            return None
        self.log.info("the broker is full: saving early, so that %d trained groups can leave", len(self.settling.ids))
        return "checkpoint" if self.config.learner.settle_on == "checkpoint" else "snapshot"

    def _save(self, kind: Kind) -> None:
        """Copy what a checkpoint of this version holds and have it written. The others take their part in copying."""
        started = time.monotonic()
        with self.exposed.phase("saving"):
            copy = self.trainer.capture()
        assert copy is not None
        state = State(
            version=self.version,
            ranks=dist.get_world_size(),
            groups=self.settling.ids,
            epoch=self.epoch,
            position=self.broker.position(),
            steps=copy.steps,
            counters=self.reporter.counters(),
            adapter=asdict(self.trainer.adapter) if self.trainer.adapter is not None else None,
        )
        self.saver.start(kind, state, copy.write)
        self.log.info("%s of version %d: copied in %.2f s", kind, self.version, time.monotonic() - started)

    def _settle(self, wait_s: float = 0.0) -> Saved | None:
        """Settle what the save that has ended made durable. FencedError: a newer learner took over."""
        saved = self.saver.ended(wait_s)
        if saved is not None and saved.error is None:
            self._durable = saved.state.version
            self.exposed.saved()
            self.settling.saved(saved.kind, saved.state.groups)
        return saved

    def save_now(self, kind: Kind) -> bool:
        """Save this version and wait until it is durable and settled; between two steps, on rank 0, while the others
        wait for their share. Returns whether it is: a failure is logged."""
        self._wait_for_saver()
        self._tell([Share("wait", save=True)] * dist.get_world_size())
        self._save(kind)
        saved = self._wait_for_saver()
        return saved is not None and saved.error is None

    def _wait_for_saver(self) -> Saved | None:
        """Until nothing is being written. The others hear of us meanwhile."""
        saved = None
        while self.saver.busy and (saved := self._settle(ranks.IDLE_S)) is None:
            self._tell([Share("wait")] * dist.get_world_size())
        return saved

    def _save_last(self) -> bool:
        """Make this version durable; whether that is done. Where the next round reads it, a snapshot is enough."""
        self._wait_for_saver()
        if self._elastic and not self.complete and self.config.learner.snapshot_folder is None:
            return self._durable == self.version or self.save_now("snapshot") or self.save_now("checkpoint")
        if self.saver.checkpointed == self.version or self.save_now("checkpoint"):
            return True
        self.save_now("snapshot")  # the run's work outlives a shared storage that does not take it
        return False

    def _finish(self, publisher: WeightPublisher) -> None:
        """Everything is saved; then, if the run is complete, everybody is told."""
        saved = self._save_last()
        self._tell([Share("stop")] * dist.get_world_size())
        if not saved:
            raise HeadraceError(f"version {self.version} has no checkpoint: see the log; resume when that is mended")
        if self.complete:
            try:
                publisher.wait(self.config.weights.timeout_s)
            except PublishError as error:  # the run has its checkpoint; nobody samples with this version any more
                self.log.warning("the last version did not reach every generator: %s", error)
            self.broker.finish()
            self.broker.announce({"type": "stop"})
            self.log.info("run complete")
        else:
            self.log.info("stopped by signal at version %d", self.version)

    def _heartbeat(self, broker: Broker, epoch: int) -> None:
        world = float(dist.get_world_size())
        while not self.stopping.wait(self.config.broker.heartbeat_s):
            broker.heartbeat(
                Member(
                    id="learner",
                    role="learner",
                    state="serving",
                    version=self.version,
                    epoch=epoch,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    counters={"ranks": world, **self.exposed.hunger()},
                )
            )


