"""`python -m tests.chaos.resume`: a learner that was killed and resumed ends with the weights of one that was not.

The product's own learner (torch, DeepSpeed, the tiny model in float32) on a real server that holds a fixed stream of
groups. All ranks are killed at once, at a random moment of a random step; then as many as the case says resume from the
newest whole snapshot or checkpoint and train to the end. The reference ran to the end with as many ranks as the killed
run began with. Processes are forked from one that has imported everything.

Exit code 0: every weight and every moment of AdamW is within `--tolerance` of the reference's, and the ledger counts
each group trained and settled once.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from broker import Broker, Server
from common import log as logs
from common.config import BrokerConfig, Config
from common.trajectory import Group, Prompt, Response, VersionRun
from learner import checkpoint
from learner.capture import POLICY, files_of
from learner.loop import Learner

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ((1, 1), (2, 1), (1, 2), (4, 2))
STAGES = (1, 2, 3)
STEPS, GROUPS = 10, 4
END_S = 240.0


@dataclass(frozen=True)
class Case:
    before: int  # ranks that are killed
    after: int  # ranks that resume
    stage: int

    def __str__(self) -> str:
        return f"{self.before} -> {self.after} ranks, ZeRO {self.stage}"


@dataclass(frozen=True)
class Outcome:
    """`again`: steps that were trained a second time. Differences are the largest of any element."""

    case: str
    killed_at: int
    resumed_from: int
    again: int
    weights: float
    exp_avg: float
    exp_avg_sq: float
    problem: str = ""


def groups() -> list[Group]:
    """The stream: groups of four responses of 1 to 24 tokens, some right, with log-probabilities somewhat off."""
    rng = np.random.default_rng(11)

    def response(right: bool) -> Response:
        tokens = int(rng.integers(1, 25))
        return Response(
            token_ids=rng.integers(0, 500, tokens).astype(np.int32),
            logprobs=rng.normal(-6, 0.3, tokens).astype(np.float32),
            versions=(VersionRun(0, 0),), finish_reason="stop",
            raw_reward=float(right), reward=float(right), correct=right,
        )  # fmt: skip

    return [
        Group(
            f"{index:09d}", rng.integers(0, 500, int(rng.integers(4, 16))).astype(np.int32),
            tuple(response(each % 2 == 0) for each in range(4)), "g", 1.0, 0.0,
        )
        for index in range(STEPS * GROUPS)
    ]  # fmt: skip


class Run:
    """One run on the server: its stream, and learners that come and go."""

    def __init__(self, name: str, folder: Path, model: Path, server: Server, stage: int, lr: float) -> None:
        self.config = Config.model_validate(
            {
                "run": {"name": name, "dir": folder},
                "model": {"path": str(model)},
                "prompts": {"type": "dataset", "path": "none"},
                "reward": {"type": "math_dapo"},
                "sampling": {"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 24},
                "broker": {"url": server.url, "password_file": server.password_file, "heartbeat_s": 0.2},
                "staleness": {"max_staleness": 1000},
                "learner": {
                    "dtype": "float32", "zero_stage": stage, "micro_batch_tokens": 128, "groups_per_step": GROUPS,
                    "max_steps": STEPS, "snapshot_every": 2, "checkpoint_every": 5, "optimizer": {"lr": lr},
                },
            }
        )  # fmt: skip
        self.folder = self.config.run.folder
        self.folder.mkdir(parents=True)
        self.broker = Broker.connect(self.config)
        for group in groups():
            self.broker.release([Prompt(group.group_id, group.prompt_ids, "", {})], int(group.group_id))
            (lease,) = self.broker.lease("g", 1, 0)
            assert self.broker.submit("g", lease, group)

    def learners(self, ranks: int, resume: bool) -> list[int]:
        """Fork the ranks of a learner; their pids."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [self._fork(rank, ranks, port, resume) for rank in range(ranks)]

    def _fork(self, rank: int, ranks: int, port: int, resume: bool) -> int:
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code = 1
        try:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            log = os.open(self.folder / f"learner-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            Learner(self.config, logs.setup(self.config.run.run_id, f"learner-{rank}"), resume).run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def finish(self, pids: list[int]) -> None:
        """Wait for all to end well."""
        deadline = time.monotonic() + END_S
        codes = {}
        while left := [pid for pid in pids if pid not in codes]:
            pid, status = os.waitpid(left[0], os.WNOHANG)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                kill(left)
                raise RuntimeError(f"a learner did not end within {END_S:.0f} s; see {self.folder}")
            else:
                time.sleep(0.02)
        if any(codes.values()):
            raise RuntimeError(f"a learner ended with {codes}; see {self.folder}")

    def wait_for(self, version: int) -> None:
        deadline = time.monotonic() + END_S
        while self.broker.version() < version:
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {version} was not reached; see {self.folder}")
            time.sleep(0.002)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What the last checkpoint holds, by kind."""
        folder = checkpoint.newest(self.config.save_folders[0])
        assert folder is not None and checkpoint.read_state(folder).version == STEPS, folder
        assert not checkpoint.broken(folder), checkpoint.broken(folder)
        found = {}
        for kind, file in files_of(POLICY).items():
            with safe_open(folder / file, framework="pt") as opened:
                found[kind] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


class Trial:
    """Cases on one server, with the references they share."""

    def __init__(self, folder: Path, model: Path, server: Server, seed: int, lr: float) -> None:
        self._folder, self._model, self._server, self._lr = folder, model, server, lr
        self._rng = random.Random(seed)
        self._count = 0
        self.reference = functools.cache(self._reference)

    def _run(self, stage: int) -> Run:
        self._count += 1
        return Run(f"run-{self._count}", self._folder, self._model, self._server, stage, self._lr)

    def _reference(self, ranks: int, stage: int) -> dict[str, dict[str, torch.Tensor]]:
        run = self._run(stage)
        run.finish(run.learners(ranks, resume=False))
        return run.tensors()

    def run(self, case: Case) -> Outcome:
        reference, run = self.reference(case.before, case.stage), self._run(case.stage)
        at = self._rng.randrange(1, STEPS)
        pids = run.learners(case.before, resume=False)
        run.wait_for(at)
        time.sleep(self._rng.uniform(0.0, 0.4))
        killed_at = run.broker.version()
        kill(pids)
        folder = checkpoint.newest(*run.config.save_folders)
        resumed_from = checkpoint.read_state(folder).version if folder else 0
        run.finish(run.learners(case.after, resume=True))
        ledger = run.broker.ledger()
        total = STEPS * GROUPS
        whole = ledger.balanced and (ledger.trained, ledger.settled) == (total, total)
        found = run.tensors()
        far = {
            kind: max(float((found[kind][name] - tensor).abs().max()) for name, tensor in tensors.items())
            for kind, tensors in reference.items()
        }
        problem = "" if whole else f"the ledger counts otherwise: {ledger}"
        return Outcome(
            str(case), killed_at, resumed_from, max(0, killed_at - resumed_from), far["weight"], far["exp_avg"],
            far["exp_avg_sq"], problem,
        )  # fmt: skip


def cases(count: int, rng: random.Random) -> list[Case]:
    """Every pair under every stage, then some at random."""
    every = [Case(before, after, stage) for stage in STAGES for before, after in PAIRS]
    return (every + [rng.choice(every) for _ in range(count - len(every))])[:count]


def parse_case(text: str) -> Case:
    before, after, stage = (int(each) for each in text.split(":"))
    return Case(before, after, stage)


def tiny_model(folder: Path) -> Path:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "examples" / "make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.make_tiny(folder)
    return path


def warm_up() -> None:
    """Import what every rank needs, once."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    assert deepspeed and AutoModelForCausalLM and AutoTokenizer and LlamaForCausalLM
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.resume", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how many runs are killed")
    parser.add_argument("--case", type=parse_case, action="append", help="BEFORE:AFTER:STAGE, instead of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm_up()
    failed = False
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        model = tiny_model(folder / "tiny")
        with Server(BrokerConfig()).start(folder / "server") as server:
            trial = Trial(folder / "runs", model, server, options.seed, options.lr)
            for case in options.case or cases(options.kills, random.Random(options.seed)):
                outcome = trial.run(case)
                bad = bool(outcome.problem) or max(outcome.weights, outcome.exp_avg) > options.tolerance
                failed = failed or bad
                text = json.dumps({**asdict(outcome), "failed": bad}) if options.json else _line(outcome, bad)
                print(text, flush=True)
    return int(failed)


def _line(outcome: Outcome, bad: bool) -> str:
    return (
        f"{outcome.case}: killed at version {outcome.killed_at}, resumed from {outcome.resumed_from}; largest "
        f"difference of a weight {outcome.weights:.1e}, of moments {outcome.exp_avg:.1e} and {outcome.exp_avg_sq:.1e}"
        f"{'; FAILED ' + outcome.problem if bad else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
