"""What is sampled twice when generators are killed all the time, with hand-over of unfinished work and without.

    python -m tests.chaos.handover [--kills N] [--generators N] [--seconds S] [--only with|without] [--json]

Real vLLM on the tiny model, the real generator, broker and weight publisher; in the learner's place somebody who
publishes perturbed weights and settles groups. Responses are of 400 tokens. While any generator serves, one is killed
(SIGKILL, its whole family) every 10 s and replaced; an engine takes longer than that to start, so the clock stands
while none serves. First one generator is drained while it is the only one that ever sampled.

Every token that vLLM's front end was told of is counted in a file that survives the process. Sampled twice is what was
sampled and is neither in a delivered group nor still kept beside a prompt. The delivered responses are scored again
with transformers under the weights of each token's stamped version. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from broker import Broker, Server
from broker.keys import GENERATORS
from broker.processes import Child, Command, await_end, kill_family, mark
from common import log as logs
from common import wirepartial
from common.config import BrokerConfig, Config
from common.trajectory import Group, Prompt, Response
from learner.publisher import WeightPublisher

ROOT = Path(__file__).resolve().parents[2]
RESPONSE_TOKENS = 400
GROUP_SIZE = 4
KILL_EVERY_S = 10.0
PUBLISH_EVERY_S = 8.0
HANDOFF_TOKENS = 16
START_S = 300.0
DRAIN_AFTER_S = 6.0
SCORED = 60  # delivered responses that are scored again, continued ones first


# --- a generator process


def generator(config_path: Path, name: str, folder: Path) -> None:
    """The product's generator; its tokens are counted, and its responses end at the limit only."""
    from generator import engine as engine_module
    from generator.handover import Handover
    from generator.loop import Generator

    config = Config.model_validate_json(config_path.read_text())
    engine_module._prepare_environment(config)
    from vllm.v1.engine.output_processor import OutputProcessor

    counter = os.open(folder / f"{name}.tokens", os.O_WRONLY | os.O_CREAT, 0o644)
    continued = os.open(folder / f"{name}.continued", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sampled = 0
    process_outputs, parameters, begin = (
        OutputProcessor.process_outputs, engine_module._sampling_params, Handover.begin,
    )  # fmt: skip

    def counted(self: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal sampled
        sampled += sum(len(output.new_token_ids) for output in outputs)
        os.pwrite(counter, b"%20d" % sampled, 0)
        return process_outputs(self, outputs, *args, **kwargs)

    def endless(*args: Any) -> Any:
        made = parameters(*args)
        made.ignore_eos = True
        return made

    def noted(self: Handover, work: Any, version: int) -> Any:
        begun = begin(self, work, version)
        if any(0 < len(each.token_ids) < RESPONSE_TOKENS for each in begun):
            os.write(continued, f"{work.lease.prompt.group_id}\n".encode())
        return begun

    OutputProcessor.process_outputs = counted
    engine_module._sampling_params = endless
    Handover.begin = noted  # type: ignore[method-assign]
    log = logs.setup(config.run.run_id, name)
    asyncio.run(Generator(config, name, Broker.connect(config), log).run())


# --- in the learner's place


class Settler:
    """Publishes weights, releases prompts, takes back leases of the dead, and settles groups, which it keeps."""

    def __init__(self, config: Config, model: torch.nn.Module) -> None:
        self.config, self.model = config, model
        self.broker = Broker.connect(config)
        self.epoch = self.broker.begin(0, [])
        self.version = -1
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.groups: list[Group] = []
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._watched, args=(job,)) for job in (self._publish, self._settle)]
        for thread in self._threads:
            thread.start()

    def _watched(self, job: Any) -> None:
        try:
            job()
        except BaseException as error:
            self._failures.append(error)

    def check(self) -> None:
        if self._failures:
            raise self._failures[0]

    def _publish(self) -> None:
        publisher = WeightPublisher(self.broker, self.config, logs.setup(self.config.run.run_id, "learner"))
        try:
            while True:
                version = self.version + 1
                rng = torch.Generator().manual_seed(version)
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.add_(0.01 * torch.randn(parameter.shape, generator=rng))
                self.versions[version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
                publisher.publish(version, self.model.state_dict().items(), torch.float32)
                self.version = version
                if self._stop.wait(PUBLISH_EVERY_S):
                    return
        finally:
            publisher.close()

    def _settle(self) -> None:
        rng, recorded = np.random.default_rng(self.config.run.seed), 0
        while not self._stop.wait(0.2):
            self.broker.reclaim()
            if self.broker.queues().prompts_waiting < 8:
                position = self.broker.position()
                lengths = rng.integers(8, 40, 8)
                self.broker.release(
                    [
                        Prompt(f"{position + i:09d}", rng.integers(2, 500, n).astype(np.int32), "p", {}, 0, recorded)
                        for i, n in enumerate(lengths)
                    ],
                    position,
                )
            taken = self.broker.take(self.epoch, 64, 0)
            while recorded < self.version or taken:
                recorded += 1
                self.broker.step(self.epoch, recorded, taken)
                self.broker.settle(self.epoch, [each.group.group_id for each in taken])
                self.groups += [each.group for each in taken]
                taken = []

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.groups += [each.group for each in self.broker.take(self.epoch, 1000, 0)]

    def kept(self) -> int:
        """Tokens kept beside prompts."""
        packed = self.broker._client.hgetall(self.broker.keys.partial)
        return sum(
            wirepartial.decode_partial(data, name.decode(), GROUP_SIZE).tokens for name, data in packed.items()
        )


# --- one arm


@dataclass
class Arm:
    """What happened with one setting of `handoff_tokens`. Tokens, seconds, responses."""

    handoff_tokens: int
    kills: int = 0
    serving_s: float = 0.0
    seconds: float = 0.0
    sampled: int = 0
    delivered: int = 0
    kept: int = 0
    at_stake: int = 0  # kept of the victims' unfinished groups when they were killed
    twice: int = 0
    twice_share: float = 0.0
    versions: int = 0
    groups: int = 0
    continued_groups: int = 0
    duplicates: int = 0
    drained: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    scored: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Generator processes that are killed and replaced."""

    def __init__(self, settler: Settler, folder: Path) -> None:
        self.settler, self.broker, self.folder = settler, settler.broker, folder
        self.children: dict[str, Child] = {}
        self._token, self._started = f"handover-{os.getpid()}-{folder.name}", 0

    def start(self) -> str:
        name = f"g{self._started}"
        self._started += 1
        path = self.folder / "config.json"
        path.write_text(self.settler.config.model_dump_json())
        argv = (sys.executable, "-m", "tests.chaos.handover", "generator", str(path), name, str(self.folder))
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.children[name] = Child(Command(name, "generator", argv, environ), self._token, self.folder)
        return name

    def serving(self) -> list[str]:
        """Generators that hold a prompt-taking state, those first that have been there for longest."""
        states = {member.id: member.state for member in self.broker.members("generator")}
        return [name for name in self.children if states.get(name) == "serving"]

    def tick(self) -> None:
        """Look for what should not happen."""
        time.sleep(0.1)
        self.settler.check()
        for name, child in self.children.items():
            if child.exit_code is not None:
                raise SystemExit(f"{name} ended with {child.exit_code}:\n{child.output()[-3000:]}")

    def until_serving(self, name: str) -> None:
        deadline = time.monotonic() + START_S
        while name not in self.serving():
            self.tick()
            if time.monotonic() > deadline:
                log = self.children[name].output()[-3000:]
                raise SystemExit(f"{name} does not serve after {START_S:.0f} s:\n{log}")

    def at_stake(self, name: str) -> int:
        """Tokens that are kept of the unfinished groups a generator holds."""
        keys, client = self.broker.keys, self.broker._client
        tokens = 0
        for entry in client.xpending_range(keys.prompts, GENERATORS, "-", "+", 100, consumername=name):
            for _, fields in client.xrange(keys.prompts, entry["message_id"], entry["message_id"]):
                packed = client.hget(keys.partial, fields[b"g"])
                tokens += wirepartial.decode_partial(packed, fields[b"g"].decode(), GROUP_SIZE).tokens if packed else 0
        return tokens

    def kill(self, name: str) -> None:
        self.children.pop(name).kill()

    def leave(self, names: Iterable[str], how: str) -> dict[str, Any]:
        """Have them leave; the longest it took, and their exit codes."""
        started, names = time.monotonic(), list(names)
        leaving = {name: self.children.pop(name) for name in names}
        members = {member.id: member for member in self.broker.members("generator")}
        for name, child in leaving.items():
            if how == "drain":
                self.broker.drain(members[name])
            else:
                child.terminate()
        await_end([child.pid for child in leaving.values()], 60.0)
        seconds = time.monotonic() - started
        codes = sorted({child.exit_code for child in leaving.values()}, key=str)
        for child in leaving.values():
            child.kill()
        return {"generators": len(leaving), "exit_codes": codes, "seconds": round(seconds, 1)}

    def sampled(self) -> int:
        return sum(int(path.read_bytes() or 0) for path in self.folder.glob("*.tokens"))

    def continued(self) -> set[str]:
        return {line for path in self.folder.glob("*.continued") for line in path.read_text().split()}

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
        kill_family(mark(self._token), [])


def configuration(handoff_tokens: int, model: Path, server: Server) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "handover", "dir": "/nonexistent"},
            "model": {"path": str(model)},
            "prompts": {"type": "dataset", "path": "none"},
            "reward": {"type": "function", "function": "examples.tiny_reward:contains_digit", "correct_at": 1.0},
            "sampling": {
                "group_size": GROUP_SIZE, "max_prompt_tokens": 64, "max_response_tokens": RESPONSE_TOKENS,
                "dynamic_sampling": False,
            },
            "generator": {
                "dtype": "float32", "prompts_in_flight": 4, "kv_cache_mb": 256, "block_size": 32, "max_num_seqs": 32,
                "enforce_eager": True, "handoff_tokens": handoff_tokens,
            },
            "broker": {
                "url": server.url, "password_file": str(server.password_file), "heartbeat_s": 0.5, "member_ttl_s": 3.0,
                "lease_ttl_s": 30.0,
            },
            "staleness": {"max_staleness": 20},
            "weights": {"backend": "gloo", "timeout_s": 60.0},
        }
    )  # fmt: skip


def run(handoff_tokens: int, kills: int, generators: int, seconds: float, model: Path, folder: Path) -> Arm:
    """One arm, from an empty server to the accounts; nobody is killed any more after `seconds`."""
    from transformers import AutoModelForCausalLM

    arm, started = Arm(handoff_tokens), time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(Server(BrokerConfig()).start(folder))
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        settler = Settler(configuration(handoff_tokens, model, server), weights)
        stack.callback(settler.broker.close)
        fleet = Fleet(settler, folder)
        try:
            first = fleet.start()
            if handoff_tokens:
                fleet.until_serving(first)
            for _ in range(generators - 1):
                fleet.start()
            if handoff_tokens:
                arm.drained = _drain_the_only_one(fleet, first)
                fleet.start()
            _kill(fleet, arm, kills, started + seconds)
            arm.left = fleet.leave(fleet.children.copy(), "SIGTERM")
        finally:
            fleet.close()
            settler.close()
        settler.check()
        arm.sampled, arm.kept = fleet.sampled(), settler.kept()
        arm.delivered = sum(group.response_tokens for group in settler.groups)
        arm.twice = arm.sampled - arm.delivered - arm.kept
        arm.twice_share = arm.twice / max(arm.sampled, 1)
        arm.versions, arm.groups = settler.version + 1, len(settler.groups)
        arm.duplicates = settler.broker.ledger().duplicates
        arm.continued_groups = len(fleet.continued() & {group.group_id for group in settler.groups})
        arm.seconds = time.monotonic() - started
        arm.scored = score(settler, fleet.continued())
    return arm


def _drain_the_only_one(fleet: Fleet, name: str) -> dict[str, Any]:
    """While the others are still starting; what it has sampled is then all there is."""
    begun, settler = time.monotonic(), fleet.settler
    while time.monotonic() - begun < DRAIN_AFTER_S:
        fleet.tick()
    outcome = fleet.leave([name], "drain")
    delivered = 0
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # until what it has submitted is settled
        delivered = sum(group.response_tokens for group in settler.groups)
        if fleet.sampled() == delivered + settler.kept():
            break
        fleet.tick()
    kept = settler.kept()
    return {**outcome, "sampled": fleet.sampled(), "handed_over": kept, "lost": fleet.sampled() - delivered - kept}


def _kill(fleet: Fleet, arm: Arm, kills: int, until: float) -> None:
    clock, before = 0.0, time.monotonic()
    while arm.kills < kills and time.monotonic() < until:
        fleet.tick()
        now = time.monotonic()
        serving = fleet.serving()
        if serving:
            clock += now - before
        before = now
        if clock >= KILL_EVERY_S and serving:
            arm.at_stake += fleet.at_stake(serving[0])
            fleet.kill(serving[0])
            fleet.start()
            arm.kills += 1
            arm.serving_s += clock
            clock = 0.0
            print(f"kill {arm.kills} of {kills}, {len(fleet.settler.groups)} groups", file=sys.stderr, flush=True)


# --- scoring again


def score(settler: Settler, continued: set[str]) -> dict[str, Any]:
    """How far the engines' log-probabilities are from a plain float32 forward of each token's own weights."""
    pairs = [(group, response) for group in settler.groups for response in group.responses]
    pairs.sort(key=lambda pair: pair[0].group_id not in continued)
    errors: dict[bool, list[float]] = {True: [], False: []}
    seams = 0
    for group, response in pairs[:SCORED]:
        stitched = group.group_id in continued
        seams += len(response.versions) - 1
        errors[stitched].append(_error(settler, group.prompt_ids, response))
    return {
        "continued_responses": len(errors[True]),
        "other_responses": len(errors[False]),
        "seams": seams,
        "worst_continued": max(errors[True], default=0.0),
        "worst_other": max(errors[False], default=0.0),
        "median_continued": statistics.median(errors[True] or [0.0]),
    }


def _error(settler: Settler, prompt: np.ndarray, response: Response) -> float:
    ids = torch.tensor(np.concatenate([prompt, response.token_ids]), dtype=torch.long)
    versions, worst = response.token_versions(), 0.0
    for version in np.unique(versions):
        weights = settler.versions[int(version)]
        with torch.no_grad():
            out = torch.func.functional_call(settler.model, weights, (ids[None, :-1],), tie_weights=True)
        scores = out.logits[0].float().log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()
        worst = max(worst, float(np.abs(scores - response.logprobs)[versions == version].max()))
    return worst


def main() -> int:
    if sys.argv[1:2] == ["generator"]:
        config, name, folder = sys.argv[2:]
        generator(Path(config), name, Path(folder))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.handover", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=6, help="SIGKILLs in each of the two runs")
    parser.add_argument("--generators", type=int, default=3, help="generators kept alive or starting")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="kill nobody after this long, in each run")
    parser.add_argument("--only", choices=["with", "without"], help="one of the two runs")
    parser.add_argument("--handoff-tokens", type=int, default=HANDOFF_TOKENS)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="handover-"))
    arms: dict[str, Arm] = {}
    for name, handoff_tokens in (("with", options.handoff_tokens), ("without", 0)):
        if options.only in (None, name):
            folder = root / name
            folder.mkdir()
            arm = run(handoff_tokens, options.kills, options.generators, options.seconds, options.model, folder)
            arms[name] = arm
            if not options.json:
                print(json.dumps(asdict(arm), indent=2), flush=True)
    worst = max(arm.scored["worst_continued"] for arm in arms.values())
    drained = [arm.drained["lost"] for arm in arms.values() if arm.drained]
    held = all(arm.kills and arm.twice_share < 0.05 for arm in arms.values() if arm.drained)
    result = {
        **{f"twice_share_{name}": arm.twice_share for name, arm in arms.items()},
        "drained_lost": drained,
        "worst_continued": worst,
        "worst_other": max(arm.scored["worst_other"] for arm in arms.values()),
        "ok": held and not any(drained) and worst < 1e-3,
        "arms": {name: asdict(arm) for name, arm in arms.items()},
    }
    print(json.dumps(result))
    if options.keep:
        print(f"logs: {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
