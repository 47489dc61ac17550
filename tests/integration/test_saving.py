"""Saving beside the step, on a real server: what settles when, and what a full disk or a full broker does to a run.

The learner is the product's, on one rank, with a trainer whose weights are the batches it saw.
"""

from __future__ import annotations

import errno
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from broker_helpers import MakeConfig, prompt, submit
from typer.testing import CliRunner
from valkey_helpers import free_port

from broker import Broker, BrokerFullError, Member
from common import log as logs
from common.config import Config
from common.errors import ConfigError, FencedError, HeadraceError
from common.trajectory import Group, Response, VersionRun
from learner import checkpoint, cli_checkpoint, loop, ranks, resuming
from learner.checkpoint import Folder, State
from learner.collector import Batch
from learner.objective_metrics import MetricSums
from learner.packing import Packed
from learner.saving import Saver
from learner.settling import Settling
from learner.trainer import UpdateResult

LOG = logs.Logger("test", "learner")


def write(folder: Folder) -> None:
    folder.write("weights", [b"1234"])


def full(_: Folder) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def ended(saver: Saver) -> Any:
    return saver.ended(30.0)


# -- settling


@pytest.mark.parametrize(("settle_on", "after"), [("snapshot", (2, 4)), ("checkpoint", (0, 4)), ("step", (3, 4))])
def test_groups_settle_when_what_holds_them_is_durable(
    make_config: MakeConfig, settle_on: str, after: tuple[int, int]
) -> None:
    broker = Broker.connect(make_config(learner={"settle_on": settle_on}))
    submit(broker, 4)
    epoch = broker.begin(0, [])
    inside = Settling(broker, epoch, broker.config)
    saver = Saver(broker.config, LOG, lambda: broker.hold(epoch))
    inside.trained(1, Batch(tuple(broker.take(epoch, 2, 0)), 0.0))
    saver.start("snapshot", State(1, 1, inside.ids, epoch), write)
    inside.trained(2, Batch(tuple(broker.take(epoch, 1, 0)), 0.0))  # while the snapshot is being written
    saved = ended(saver)
    inside.saved(saved.kind, saved.state.groups)
    assert broker.ledger().settled == after[0], "what the snapshot does not name stays"
    inside.trained(3, Batch(tuple(broker.take(epoch, 1, 0)), 0.0))
    saver.start("checkpoint", State(3, 1, inside.ids, epoch), write)
    saved = ended(saver)
    inside.saved(saved.kind, saved.state.groups)
    assert (broker.ledger().settled, inside.all_settled, saver.checkpointed) == (after[1], True, 3)
    broker.close()


def test_learner_that_was_replaced_makes_nothing_durable(broker: Broker) -> None:
    epoch = broker.begin(0, [])
    saver = Saver(broker.config, LOG, lambda: broker.hold(epoch))
    broker.begin(0, [])
    for fill in (write, full):  # a failed save of one that was replaced is no failure of the disk
        saver.start("snapshot", State(1, 1, (), epoch), fill)
        with pytest.raises(FencedError):
            ended(saver)
    assert checkpoint.everything(*broker.config.save_folders) == []


# -- what is due


def test_due_checkpoints_before_snapshots_and_only_when_the_writer_is_free(make_config: MakeConfig) -> None:
    config = make_config(learner={"snapshot_every": 2, "checkpoint_every": 6})
    saver, going = Saver(config, LOG, lambda: None), threading.Event()
    assert [saver.due(version) for version in (1, 2)] == [None, "snapshot"]

    def slow(folder: Folder) -> None:
        going.wait(30.0)
        write(folder)

    saver.start("snapshot", State(2, 1, ()), slow)
    assert [saver.due(version) for version in (3, 4, 5, 6)] == [None] * 4
    assert saver.busy and saver.ended() is None
    going.set()
    assert ended(saver).error is None
    assert saver.due(7) == "checkpoint", "what fell due meanwhile"
    saver.start("checkpoint", State(7, 1, ()), write)
    ended(saver)
    assert [saver.due(version) for version in (8, 9, 10)] == ["snapshot", "snapshot", "snapshot"]


def test_failed_save_is_logged_keeps_the_one_before_it_and_the_next_one_works(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    saver = Saver(config, LOG, lambda: None)
    saver.start("snapshot", State(1, 1, ()), write)
    ended(saver)
    with caplog.at_level(logging.ERROR, "headrace"):
        saver.start("snapshot", State(2, 1, ()), full)
        assert ended(saver).error.errno == errno.ENOSPC
    assert "snapshot of version 2 under" in caplog.text and "No space left on device" in caplog.text
    assert saver.resting
    assert checkpoint.newest(*config.save_folders) == checkpoint.folder_for(config.save_folders[1], 1)
    saver.start("snapshot", State(3, 1, ()), write)
    assert ended(saver).error is None
    assert checkpoint.newest(*config.save_folders) == checkpoint.folder_for(config.save_folders[1], 3)


# -- resuming


def test_what_takes_longer_than_a_collective_may_is_awaited(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.init("gloo")
    monkeypatch.setattr(ranks, "IDLE_S", 0.01)
    said, broadcast = [], ranks.broadcast
    enough = threading.Event()

    def heard(data: bytes | None, source: int) -> bytes:
        said.append(data)
        if len(said) == 3:
            enough.set()
        return broadcast(data, source)

    monkeypatch.setattr(ranks, "broadcast", heard)
    assert ranks.broadcast_made(lambda: b"whole" if enough.wait(30) else b"late", 0) == b"whole"
    assert set(said[:3]) == {b""} and said[-1] == b"whole", "the others hear something meanwhile"


@pytest.mark.timeout(60)
def test_choose_skips_broken_ones_with_what_is_wrong_and_takes_the_newest_whole_one(
    make_config: MakeConfig, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    roots = make_config().save_folders
    for root, version in zip((*roots, *roots, roots[0]), (1, 2, 3, 4, 5), strict=True):
        checkpoint.save(root, State(version, 3, ("a",), epoch=1), write, keep=9)
    (checkpoint.folder_for(roots[0], 5) / "weights").write_bytes(b"123")
    (checkpoint.folder_for(roots[1], 4) / "weights").write_bytes(b"1235")
    (checkpoint.folder_for(roots[0], 3) / checkpoint.STATE).write_text("{")
    ranks.init("gloo")
    with caplog.at_level(logging.WARNING, "headrace"):
        stored = resuming.choose(roots, LOG)
    assert stored is not None and (stored.state.version, stored.folder) == (2, checkpoint.folder_for(roots[1], 2))
    for said in (
        "step-00000005 is skipped: weights has 3 bytes, 4 were written",
        "step-00000004 is skipped: weights does not hold what was written",
        "step-00000003 is skipped: state.json cannot be read",
    ):
        assert said in caplog.text
    resuming.require_newest(roots, stored.state)  # broken ones do not count
    checkpoint.save(roots[0], State(6, 3, (), epoch=1), write, keep=9)
    with pytest.raises(FencedError, match="step-00000006 was written while"):
        resuming.require_newest(roots, stored.state)


def test_commands_list_and_verify_name_whole_and_broken_ones(make_config: MakeConfig) -> None:
    config = make_config()
    for root, version in zip(config.save_folders, (1, 2), strict=True):
        checkpoint.save(root, State(version, 3, ("a",), epoch=1), write, keep=9)
    run, runner = str(config.run.folder), CliRunner()
    listed = json.loads(runner.invoke(cli_checkpoint.app, ["list", run, "--json"]).stdout)
    assert [(row["version"], row["ranks"], row["unsettled"]) for row in listed] == [(2, 3, 1), (1, 3, 1)]
    assert runner.invoke(cli_checkpoint.app, ["verify", run]).exit_code == 0
    (checkpoint.folder_for(config.save_folders[1], 2) / "weights").write_bytes(b"")
    verified = runner.invoke(cli_checkpoint.app, ["verify", run])
    assert verified.exit_code == 1
    assert "step-00000001: whole" in verified.stdout
    assert "step-00000002: broken: weights has 0 bytes, 4 were written" in verified.stdout
    nothing = runner.invoke(cli_checkpoint.app, ["verify", str(config.run.dir)])
    assert isinstance(nothing.exception, ConfigError) and "no checkpoint under" in str(nothing.exception)


# -- the loop


class LightTrainer:
    """What `Learner` needs of `Trainer` on one rank; its weights are the number of tokens it was shown."""

    adapter = sends = work = None

    def __init__(self, config: Config) -> None:
        self.tokens = 0

    def train(self, updates: Sequence[Sequence[Packed]], step: int) -> list[UpdateResult]:
        metrics = replace(MetricSums.zero().finish(2.0), tokens=1)
        self.tokens += sum(int(pack.mask.sum()) for packs in updates for pack in packs)
        return [UpdateResult(metrics, 1.0, 1e-6, 0.0) for _ in updates]

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.zeros(1)

    def capture(self) -> Any:
        class Copy:
            steps = {"policy": 1}  # noqa: RUF012

            @staticmethod
            def write(folder: Folder) -> None:
                folder.write("weights", [str(self.tokens).encode()])

        return Copy()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a learner of one rank, whose signals are put back."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(loop, "Trainer", LightTrainer)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


def big(group_id: str) -> Group:
    def response(reward: float) -> Response:
        tokens = np.arange(16, dtype=np.int32)
        logprobs = np.full(16, -1.0, np.float32)
        return Response(tokens, logprobs, (VersionRun(0, 0),), "stop", reward, reward, reward > 0)

    ids = np.arange(60, dtype=np.int32)
    return Group(group_id, ids, (response(0.0), response(1.0)), "g1", 1.0, time.time())


def produce(broker: Broker, count: int, stop: threading.Event) -> None:
    """A generator: hands in group after group, waits while the broker is full, and says so."""
    for _ in range(count):
        position = broker.position()
        while not broker.release([prompt(position)], position):
            if stop.wait(0.05):
                return
        (lease,) = broker.lease("g1", 1, 0)
        while True:
            counters = {"broker_full_s": broker.pressure.seconds}
            broker.heartbeat(Member("g1", "generator", "draining", counters=counters))
            try:
                assert broker.submit("g1", lease, big(lease.prompt.group_id))
                break
            except BrokerFullError:
                if stop.wait(0.05):
                    return


def run_with_producer(config: Config, count: int) -> None:
    stop, broker = threading.Event(), Broker.connect(config)
    producer = threading.Thread(target=produce, args=(broker, count, stop), daemon=True)
    producer.start()
    try:
        loop.Learner(config, LOG, resume=False).run()
    finally:
        stop.set()
        producer.join()
        broker.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("settle_on", ["snapshot", "checkpoint"])
def test_full_broker_makes_the_learner_save_early_and_the_run_goes_on(
    make_config: MakeConfig, alone: None, settle_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker holds fewer groups than are trained between two saves: without an early one nothing would move."""
    config = make_config(
        broker={"max_bytes": 6_000, "heartbeat_s": 0.1},
        learner={"groups_per_step": 2, "max_steps": 8, "settle_on": settle_on, "snapshot_every": 100},
        staleness={"max_staleness": 100},
    )
    with caplog.at_level(logging.INFO, "headrace"):
        run_with_producer(config, 16)
    assert "the broker is full: saving early" in caplog.text
    broker = Broker.connect(config)
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, broker.finished()) == (16, 16, True)
    broker.close()


@pytest.mark.timeout(60)
def test_saves_that_fail_cost_the_run_nothing_but_themselves(
    make_config: MakeConfig, alone: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Snapshots cannot be written at all; groups stay unsettled until the checkpoint at the end."""
    (tmp_path / "file").write_text("no folder can be made in here")
    config = make_config(
        learner={"groups_per_step": 2, "max_steps": 4, "snapshot_every": 1, "snapshot_folder": tmp_path / "file"},
        staleness={"max_staleness": 100},
    )
    settled: list[int] = []
    broker = Broker.connect(config)
    with pytest.MonkeyPatch.context() as patch:
        finish = _before(loop.Learner._finish, lambda: settled.append(broker.ledger().settled))
        patch.setattr(loop.Learner, "_finish", finish)
        run_with_producer(config, 8)
    assert "snapshot of version 1 under" in caplog.text
    ledger = broker.ledger()
    assert (settled, ledger.trained, ledger.settled, broker.finished()) == ([0], 8, 8, True)
    broker.close()


@pytest.mark.timeout(60)
def test_run_whose_last_checkpoint_fails_keeps_a_snapshot_and_says_so(make_config: MakeConfig, alone: None) -> None:
    config = make_config(
        learner={"groups_per_step": 2, "max_steps": 2, "snapshot_every": 0}, staleness={"max_staleness": 100}
    )
    config.run.folder.mkdir(parents=True)
    config.save_folders[0].write_text("in the way")
    with pytest.raises(HeadraceError, match="version 2 has no checkpoint"):
        run_with_producer(config, 4)
    newest = checkpoint.newest(*config.save_folders)
    assert newest == checkpoint.folder_for(config.save_folders[1], 2) and not checkpoint.broken(newest)
    broker = Broker.connect(config)
    assert not broker.finished() and broker.ledger().settled == 4
    broker.close()


def _before(function: Callable[..., Any], what: Callable[[], object]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        what()
        return function(*args)

    return call
