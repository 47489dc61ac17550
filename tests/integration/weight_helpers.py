"""A generator's end of weight updates without an engine: the real protocol and the real receiver, in a thread."""

from __future__ import annotations

import os
import socket
import threading
from typing import Literal

import torch

from broker import Broker, Member
from common.checksum import sampled_checksum
from common.weightcontrol import Ack, Commit, Form, Stage, Update, read_control
from common.weightwire import plan_buckets
from generator.receive import StagedReceive

Flaw = Literal["deaf", "dies", "mute", "damaged", "always damaged"]


class PlainGenerator:
    """Receives weights as a generator does and keeps them in `weights`, per version; `updates`: what it was sent.

    `flaw`: "deaf" never answers a Form; "dies" vanishes when it should receive; "mute" never says that it has loaded;
    "damaged" finds other bytes than were sent, the first time; "always damaged" every time.
    """

    def __init__(self, broker: Broker, generator_id: str, flaw: Flaw | None = None) -> None:
        self.broker, self.id, self.flaw = broker, generator_id, flaw
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.forms: list[Form] = []
        self.updates: list[Update] = []
        self.loaded = threading.Condition()
        self.done = threading.Event()
        self._state: Literal["syncing", "serving"] = "syncing"
        self._after = broker.last_control()
        self._beat()
        self._threads = [threading.Thread(target=job, daemon=True) for job in (self._follow, self._heartbeat)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, version: int, timeout_s: float = 20) -> dict[str, torch.Tensor]:
        with self.loaded:
            assert self.loaded.wait_for(lambda: version in self.weights, timeout_s), f"{self.id} has no {version}"
        return self.weights[version]

    def close(self) -> None:
        self.done.set()
        for thread in self._threads:
            thread.join(10)

    def _beat(self) -> None:
        member = Member(
            self.id, "generator", self._state, max(self.weights, default=-1), 0, socket.gethostname(), os.getpid(), {}
        )
        self.broker.heartbeat(member)

    def _heartbeat(self) -> None:
        while not self.done.wait(self.broker.config.broker.heartbeat_s):
            self._beat()

    def _say(self, stage: Stage, epoch: int, version: int, checksum: int | None = None) -> None:
        self.broker.acknowledge(Ack(self.id, epoch, version, stage, checksum=checksum).message())

    def _follow(self) -> None:
        receive: StagedReceive | None = None
        epoch = 0
        while not self.done.is_set():
            for entry_id, message in self.broker.controls(self._after, 200):
                self._after = entry_id
                control = read_control(message)
                if isinstance(control, Form) and self.id in control.ranks:
                    self.forms.append(control)
                    if self.flaw == "deaf":
                        continue
                    epoch = control.epoch
                    rank = control.ranks[self.id]
                    receive = StagedReceive(
                        control.host, control.port, rank, control.world_size, control.timeout_s, receive
                    )
                    self._say("formed", epoch, -1)
                elif isinstance(control, Update) and control.epoch == epoch and receive is not None:
                    self.updates.append(control)
                    self._say("receiving", epoch, control.version)
                    if self.flaw == "dies":
                        self.done.set()
                        return
                    receive.stage(plan_buckets(control.parameters, self.forms[-1].bucket_bytes), control.version)
                elif isinstance(control, Commit) and control.epoch == epoch and receive is not None:
                    self._load(control, receive)

    def _load(self, commit: Commit, receive: StagedReceive) -> None:
        if self.flaw == "mute":
            return
        checksum = receive.checksum(commit.version)
        if self.flaw in ("damaged", "always damaged"):
            self.flaw = None if self.flaw == "damaged" else self.flaw
            buckets = receive.take()
            buckets[0][:300] += 1
            checksum = sampled_checksum(receive.plan, buckets, commit.version)
            self._say("corrupt", commit.epoch, commit.version, checksum)
            return
        buckets = zip(receive.plan, receive.take(), strict=True)
        received = {slot.parameter.name: slot.view(bucket).clone() for slots, bucket in buckets for slot in slots}
        self._state = "serving"
        self._say("loaded", commit.epoch, commit.version, checksum)
        with self.loaded:
            self.weights[commit.version] = received
            self.loaded.notify_all()
