"""The learner: take a batch, train on it, publish, report, now and then make it durable.

Read `Learner._lead` and you have read the learner; the other ranks (`_follow`) do the same work on their share. What it
promises:

- no token older than `staleness.max_staleness` versions enters an optimizer step;
- the policy version goes up by one per batch, and weights are on their way to the generators before anything else
  happens after the step;
- groups are acknowledged to the broker only when a checkpoint that contains their effect is durable, and the
  checkpoint carries the ids of those that were not yet acknowledged when it was made (`learner.settle_on: checkpoint`;
  see `learner.settling`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from broker import Broker, Member
from common import wire
from common.config import Config
from common.errors import ConfigError
from common.log import Logger
from common.metrics import JsonlSink, MetricSink, TensorBoardSink
from learner import checkpoint, ranks
from learner.batch import Step, any_too_old, build_step, split_groups
from learner.collector import Batch, Collector
from learner.packing import Packed, plan
from learner.publisher import PublishError, WeightPublisher
from learner.report import Reporter
from learner.settling import Settling
from learner.trainer import Trainer, UpdateResult


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
        self.root = config.run.folder / "checkpoints"
        self.stopping = threading.Event()
        self.version = 0
        self._resume = resume
        self._start = self._resume_from() if resume else None

    def _resume_from(self) -> Path | None:
        folder = checkpoint.newest(self.root)
        if folder is None:
            self.log.warning("no checkpoint under %s: starting from the model", self.root)
            return None
        ranks_now, ranks_then = self.config.learner.ranks, checkpoint.read_state(folder).ranks
        if ranks_now != ranks_then:
            raise ConfigError(f"learner.ranks: {ranks_now}, but {folder} was made by {ranks_then}; use {ranks_then}")
        return folder

    def run(self) -> None:
        """Train until `max_steps`, or until SIGTERM; both end with a checkpoint."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        ranks.init("nccl" if torch.cuda.is_available() else "gloo")
        started = time.monotonic()
        self.trainer = Trainer(self.config)
        restored: checkpoint.State | None = None
        if self._start is not None:
            restored = checkpoint.read_state(self._start)
            self.trainer.load(self._start)
            self.version = restored.version
        self.log.version = str(self.version)
        seconds = time.monotonic() - started
        self.log.info("model and optimizer ready after %.1f s, %d ranks", seconds, dist.get_world_size())
        if dist.get_rank() == 0:
            self._lead(restored)
        else:
            self._follow()
        dist.destroy_process_group()

    # --- every rank

    def _train(self, share: Share) -> list[UpdateResult]:
        """The optimizer updates of one batch on this rank's packs; without a single trained token the version stays."""
        results = self.trainer.train(share.updates, self.version + 1)
        self.version += any(result.metrics.tokens for result in results)
        self.log.version = str(self.version)
        return results

    def _follow(self) -> None:
        while True:
            share, before = Share.from_bytes(ranks.scatter(None)), self.version
            if share.action == "train":
                self._train(share)
                if self.version == before:
                    continue
                self._publish(None)
            if share.save:
                self.trainer.save(checkpoint.partial_for(self.root, self.version))
            if share.action == "stop":
                return

    def _publish(self, publisher: WeightPublisher | None) -> float:
        """Hand the weights to the publisher (rank 0); under ZeRO-3 the others take part in gathering. Seconds taken."""
        started = time.monotonic()
        if publisher is not None:
            publisher.publish(self.version, self.trainer.weights(), getattr(torch, self.config.generator.dtype))
        elif self.config.learner.zero_stage == 3:
            for _ in self.trainer.weights():
                pass
        return time.monotonic() - started

    # --- rank 0

    def _lead(self, restored: checkpoint.State | None) -> None:
        broker = Broker.connect(self.config)
        contained = restored.groups if restored is not None else ()
        epoch = broker.begin(self.version, contained)
        if self._resume:
            checkpoint.require_newest(self.root, restored)
        self.log.info("learner epoch %d begins", epoch)
        publisher = WeightPublisher(broker, self.config, self.log)
        collector = Collector(broker, epoch, self.config)
        threading.Thread(target=self._heartbeat, args=(broker, epoch), daemon=True).start()
        folder = self.config.run.folder
        sinks: list[MetricSink] = [JsonlSink(folder / "metrics.jsonl"), TensorBoardSink(folder / "tensorboard")]
        reporter = Reporter(self.config, broker, sinks, self.log)
        settling = Settling(broker, epoch, self.config, contained)
        try:
            self._publish(publisher)
            while self.version < self.config.learner.max_steps and not self.stopping.is_set():
                batch = collector.next(self.version, ranks.IDLE_S, self.stopping)
                if batch is None:
                    reporter.waiting()
                    self._tell([Share("wait")] * dist.get_world_size())
                    continue
                steps = self._build(batch)
                if not steps:
                    self._skip(broker, epoch, batch)
                    continue
                before = self.version
                save = (self.version + 1) % self.config.learner.checkpoint_every == 0
                if save:
                    broker.hold(epoch)  # a successor may be writing there
                    checkpoint.prepare(self.root, self.version + 1)
                started = time.time()
                results = self._train(self._tell(self._shares(steps, save)))
                self._log_nonfinite(steps, results)
                reporter.updates(results)
                if self.version == before:
                    self._skip(broker, epoch, batch)
                    continue
                publish_s = self._publish(publisher)
                settling.trained(self.version, batch)
                reporter.step(self.version, batch, steps, results, started, publish_s)
                if save:
                    self._save(broker, epoch, settling)
            self._finish(broker, epoch, publisher, settling)
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

    def _shares(self, steps: list[Step], save: bool) -> list[Share]:
        """One share per rank: for every optimizer step its packs."""
        world = dist.get_world_size()
        plans = [plan(step, world, self.config.learner.micro_batch_tokens) for step in steps]
        return [Share("train", tuple(tuple(plan_[rank]) for plan_ in plans), save) for rank in range(world)]

    def _tell(self, shares: list[Share]) -> Share:
        """Send every rank its share; rank 0's own comes back."""
        ranks.scatter([share.to_bytes() for share in shares])
        return shares[0]

    def _save(self, broker: Broker, epoch: int, settling: Settling) -> None:
        """Write the checkpoint prepared for this version; once it is durable its groups leave Redis."""
        started = time.monotonic()
        self.trainer.save(checkpoint.partial_for(self.root, self.version))
        state = checkpoint.State(self.version, dist.get_world_size(), settling.ids, epoch)
        broker.hold(epoch)
        folder = checkpoint.commit(self.root, state, self.config.learner.keep_checkpoints)
        settling.saved()
        self.log.info("checkpoint %s in %.1f s", folder, time.monotonic() - started)

    def _finish(self, broker: Broker, epoch: int, publisher: WeightPublisher, settling: Settling) -> None:
        """The last checkpoint; then, if the run is complete, everybody is told."""
        last = not settling.durable
        if last:
            broker.hold(epoch)
            checkpoint.prepare(self.root, self.version)
        self._tell([Share("stop", save=last)] * dist.get_world_size())
        if last:
            self._save(broker, epoch, settling)
        if self.version >= self.config.learner.max_steps:
            try:
                publisher.wait(self.config.weights.timeout_s)
            except PublishError as error:  # the run has its checkpoint; nobody samples with this version any more
                self.log.warning("the last version did not reach every generator: %s", error)
            broker.finish()
            broker.announce({"type": "stop"})
            self.log.info("run complete")
        else:
            self.log.info("stopped by signal")

    def _heartbeat(self, broker: Broker, epoch: int) -> None:
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
                    counters={},
                )
            )


