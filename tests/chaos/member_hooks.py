"""The processes of `tests.chaos.members`: the product's own, watched, and disturbed at given versions.

    python -m tests.chaos.member_hooks generator CONFIG     every submitted group is recorded
    torchrun ... -m tests.chaos.member_hooks learner CONFIG     every published version is recorded; the disturbances

Both write to `<run folder>/members/`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from broker import Broker, Lease
from common import log as logs
from common import settings
from common.config import Config
from common.trajectory import Group
from common.wire import encode_group

JOIN_AT, KILL_AT, DRAIN_AT, PAUSE_AT = 15, 25, 35, 45
PAUSE_S = 30.0
KILLED, DRAINED, PAUSED, JOINER = "generator-1", "generator-2", "generator-0", "generator-3"
FOUNDERS = (PAUSED, KILLED, DRAINED)
START_S = 400.0  # for all engines to come up


def folder(config: Config) -> Path:
    path = config.run.folder / "members"
    path.mkdir(parents=True, exist_ok=True)
    return path


def until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Raises TimeoutError; other processes offer no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:.0f} s")
        time.sleep(0.1)


# --- a generator


def generator(config: Config) -> None:
    from generator.loop import Generator
    from generator.updates import WeightReceiver

    name = os.environ["HEADRACE_GENERATOR_ID"]
    log = logs.setup(config.run.run_id, name)
    diary = (folder(config) / f"{name}.groups").open("ab")
    submit, run = Broker.submit, WeightReceiver.run

    def recorded(self: Broker, generator_id: str, lease: Lease, group: Group) -> bool:
        data = encode_group(group)
        diary.write(struct.pack("<I", len(data)) + data)
        diary.flush()
        return submit(self, generator_id, lease, group)

    async def gated(self: WeightReceiver) -> None:
        """The joiner's engine is up, but it stays `joining` until its time has come."""
        (folder(config) / f"{name}.up").touch()
        if name == JOINER:
            await asyncio.to_thread(until, (folder(config) / "join").exists, "version to join at", 3600.0)
        await run(self)

    Broker.submit = recorded  # type: ignore[method-assign]
    WeightReceiver.run = gated  # type: ignore[method-assign]

    async def main() -> None:
        await Generator(config, name, Broker.connect(config), log).run()

    asyncio.run(main())


# --- the learner


class Disturber:
    """What happens at which version. `event` writes a line of the diary."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, folder(config)
        self.broker = Broker.connect(config)
        self.version, self.kill_pending = -1, False
        self._started = time.monotonic()
        self._diary = (self.folder / "learner.jsonl").open("a")
        self._resumed = threading.Event()

    def event(self, what: str, **values: Any) -> None:
        record = {"event": what, "version": self.version, "at_s": time.monotonic() - self._started, **values}
        print(json.dumps(record), file=self._diary, flush=True)

    def before_publish(self, version: int) -> None:
        if version == 0:
            up = [self.folder / f"{name}.up" for name in (*FOUNDERS, JOINER)]
            until(lambda: all(path.exists() for path in up), "all engines up", START_S)
        elif version == KILL_AT:
            self.kill_pending = True
        elif version == DRAIN_AT:
            os.kill(self._pid(DRAINED), signal.SIGTERM)
            self.event("drain", member=DRAINED)
        elif version == PAUSE_AT:
            threading.Thread(target=self._pause, daemon=True).start()
        elif version == self.config.learner.max_steps - 3:  # a fast run would be over before it is back
            self._resumed.wait(2 * PAUSE_S)
            until(lambda: self._member(PAUSED).version >= PAUSE_AT, f"{PAUSED} is back", 120.0)
        self.version = version

    def after_publish(self) -> None:
        if self.version == JOIN_AT:
            (self.folder / "join").touch()
            self.event("join", member=JOINER)

    def in_broadcast(self) -> None:
        """Some buckets are on their way and some are not."""
        if self.kill_pending:
            self.kill_pending = False
            self._send(KILLED, signal.SIGKILL)
            self.event("kill", member=KILLED)

    def _pause(self) -> None:
        self._send(PAUSED, signal.SIGSTOP)
        self.event("pause", member=PAUSED)
        time.sleep(PAUSE_S)
        self._send(PAUSED, signal.SIGCONT)
        self.event("resume", member=PAUSED)
        self._resumed.set()

    def _member(self, name: str) -> Any:
        found = [member for member in self.broker.members("generator") if member.id == name]
        return found[0] if found else type("Absent", (), {"version": -1, "pid": 0})

    def _pid(self, name: str) -> int:
        pid: int = self._member(name).pid
        assert pid, f"{name} is not in the registry"
        return pid

    def _send(self, name: str, number: signal.Signals) -> None:
        """To the generator and its engine: a member leads a session of its own."""
        path = self.folder / f"{name}.pid"
        if not path.exists():
            path.write_text(str(os.getsid(self._pid(name))))
        session = int(path.read_text())
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == session:
                        os.kill(int(entry.name), number)
                except (ProcessLookupError, PermissionError):
                    continue


def learner(config: Config) -> None:
    from learner import transport
    from learner.loop import Learner
    from learner.publisher import WeightPublisher

    log = logs.setup(config.run.run_id, f"learner-{os.environ['RANK']}")
    disturber = Disturber(config)
    publish, send_buckets = WeightPublisher.publish, transport.send_buckets

    def recorded(
        self: WeightPublisher, version: int, named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, *rest: Any
    ) -> None:
        disturber.before_publish(version)
        started = time.monotonic()
        publish(self, version, named, dtype, *rest)
        wait_s = time.monotonic() - started
        weights = {name: tensor.clone() for name, tensor in self._staged.tensors()}
        torch.save(weights, disturber.folder / f"{version}.pt")
        timings = {} if self.timings is None else vars(self.timings)
        disturber.after_publish()
        disturber.event("published", wait_s=wait_s, delivered=timings)

    def cut(group: Any, buckets: Any) -> None:
        works = [group.broadcast(bucket) for bucket in buckets[:2]]
        if disturber.kill_pending:
            disturber.in_broadcast()
        for work in works:
            work.wait()
        send_buckets(group, buckets[2:])

    WeightPublisher.publish = recorded  # type: ignore[method-assign]
    transport.send_buckets = cut  # type: ignore[assignment]
    Learner(config, log, resume=False).run()


if __name__ == "__main__":
    {"generator": generator, "learner": learner}[sys.argv[1]](settings.load(Path(sys.argv[2])))
