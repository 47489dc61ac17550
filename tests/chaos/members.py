"""`python -m tests.chaos.members [--policy keep] [--json]`: generators come, die, drain and freeze in a real run.

vLLM on the tiny model, three generators, 60 versions. One more joins at version 15; one is SIGKILLed in the middle of
the broadcast of 25; one is drained (SIGTERM) at 35; one is frozen (SIGSTOP, engine and all) for 30 s at 45. Then:

- the run has ended, and its ledger balances;
- the learner never waited for a delivery for longer than the deadline and 5 s;
- every sampled token's log-probability is that of the weights of its stamped version, which were saved when they were
  published: recomputed in float32, within 1e-3. Under `on_update: keep` tokens after a response's first seam are
  exempt: they were sampled on a KV cache of older weights.

Exit code 0: all of that held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from broker.local import Fleet
from broker.processes import Command
from common import settings
from common.config import Config
from common.trajectory import Group, Response
from common.wire import decode_group
from tests.chaos.member_hooks import DRAIN_AT, DRAINED, FOUNDERS, JOIN_AT, JOINER, KILL_AT, PAUSE_AT, PAUSED, folder

ROOT = Path(__file__).resolve().parents[2]
AGREE = 1e-3  # nats
SLACK_S = 5.0


def configure(policy: str, runs: Path, versions: int) -> Config:
    overrides = {
        "run.dir": runs, "run.id": policy, "model.path": ROOT / "models" / "tiny", "weights.on_update": policy,
        "weights.backend": "gloo", "weights.bucket_mb": 1, "weights.timeout_s": 20, "broker.member_ttl_s": 5,
        "broker.heartbeat_s": 0.5, "broker.lease_ttl_s": 20, "learner.max_steps": versions,
        "learner.checkpoint_every": versions, "sampling.max_response_tokens": 96, "generator.max_num_seqs": 16,
        "generator.prompts_in_flight": 3, "sampling.dynamic_sampling": False, "staleness.max_staleness": 3,
    }  # fmt: skip
    return settings.load(ROOT / "examples" / "tiny.yaml", [f"{name}={value}" for name, value in overrides.items()])


def play(config: Config) -> int:
    """Run the fleet; its exit code."""
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 1}), "eval": None})
    config.run.folder.mkdir(parents=True)
    path = config.run.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    hooks = ("-m", "tests.chaos.member_hooks")
    one = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    headrace = str(Path(sys.executable).with_name("headrace"))
    commands = [
        Command("broker", "broker", (headrace, "broker", str(path)), one),
        *(
            Command(
                name, "generator", (sys.executable, *hooks, "generator", str(path)),
                {**one, "HEADRACE_GENERATOR_ID": name},
            )
            for name in (*FOUNDERS, JOINER)
        ),
        Command("learner", "learner", (sys.executable, *torchrun, *hooks, "learner", str(path)), one),
    ]  # fmt: skip
    return Fleet(config, commands, Console(file=sys.stderr)).run()


# --- what came of it


def groups_of(path: Path) -> Iterator[Group]:
    """Of one generator; the last record of a killed one may be torn."""
    data, at = path.read_bytes(), 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if at + 4 + length > len(data):
            return
        yield decode_group(data[at + 4 : at + 4 + length])
        at += 4 + length


def rescore(config: Config, where: Path, groups: list[Group]) -> dict[str, Any]:
    """Differences between sampled and recomputed log-probabilities, before and after a response's first seam."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    parts: dict[int, list[tuple[Group, Response, int, int]]] = defaultdict(list)
    for group in groups:
        for response in group.responses:
            ends = [run.start for run in response.versions[1:]] + [len(response.token_ids)]
            for run, end in zip(response.versions, ends, strict=True):
                parts[run.version].append((group, response, run.start, end))
    whole, after = [np.zeros(0)], [np.zeros(0)]
    for version, spans in sorted(parts.items()):
        weights = torch.load(where / f"{version}.pt")
        for group, response, start, end in spans:
            ids = torch.tensor(np.concatenate([group.prompt_ids, response.token_ids[:end]]), dtype=torch.long)
            with torch.no_grad():
                logits = torch.func.functional_call(model, weights, (ids[None, :-1],), tie_weights=True).logits[0]
            scores = (logits / group.temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
            first = len(group.prompt_ids) - 1
            difference = np.abs(scores[first + start : first + end] - response.logprobs[start:end])
            (after if start else whole).append(difference)
    before_seam, after_seam = np.concatenate(whole), np.concatenate(after)
    return {
        "tokens": int(before_seam.size), "worst": float(before_seam.max(initial=0)),
        "off": int((before_seam > AGREE).sum()), "tokens_after_seam": int(after_seam.size),
        "worst_after_seam": float(after_seam.max(initial=0)),
        "mean_after_seam": float(after_seam.mean() if after_seam.size else 0),
        "off_after_seam": int((after_seam > AGREE).sum()),
    }  # fmt: skip


def judge(config: Config, code: int, seconds: float) -> dict[str, Any]:
    where, versions = folder(config), config.learner.max_steps
    diary = [json.loads(line) for line in (where / "learner.jsonl").read_text().splitlines()]
    groups = {name: list(groups_of(where / f"{name}.groups")) for name in (*FOUNDERS, JOINER)}
    published = [entry for entry in diary if entry["event"] == "published"]
    delivered = {entry["delivered"]["version"]: entry["delivered"] for entry in published if entry["delivered"]}
    scores = rescore(config, where, [group for each in groups.values() for group in each])
    log = (config.run.folder / "logs" / f"{DRAINED}.log").read_text()
    last = max((r.versions[-1].version for group in groups[DRAINED] for r in group.responses), default=-1)
    returned = [group for group in groups[PAUSED] if max(r.versions[-1].version for r in group.responses) > PAUSE_AT]
    joined = [run.version for group in groups[JOINER] for response in group.responses for run in response.versions]
    result: dict[str, Any] = {
        "policy": config.weights.on_update,
        "seconds": round(seconds, 1),
        "exit_code": code,
        "versions": max(entry["version"] for entry in published),
        "audit": json.loads((config.run.folder / "audit.json").read_text())["balanced"],
        "learner_waited_s": max(entry["wait_s"] for entry in published[1:]),
        "learner_waited_limit_s": config.weights.timeout_s + SLACK_S,
        "pause_s": statistics.median(entry["pause_s"] for entry in delivered.values()),
        "groups": {name: len(each) for name, each in groups.items()},
        "joiner_first_version": min(joined, default=None),
        "killed_broadcast": delivered.get(KILL_AT),
        "drained_said_goodbye": "gone: groups=" in log,
        "drained_last_version": last,
        "paused_groups_after_return": len(returned),
        "events": [{k: e[k] for k in ("event", "version", "member")} for e in diary if "member" in e],
        **scores,
    }
    exact_after = config.weights.on_update == "keep" or not scores["off_after_seam"]
    checks = {
        "the run ended": code == 0 and result["versions"] == versions,
        "the ledger balances": result["audit"],
        "the learner waited no longer than the deadline":
            result["learner_waited_s"] <= result["learner_waited_limit_s"],
        "log-probabilities are the stamped version's": not scores["off"] and exact_after,
        "there were seams": scores["tokens_after_seam"] > 0,
        "the joiner served": min(joined, default=-1) >= JOIN_AT,
        "the broadcast was cut and repeated": (delivered.get(KILL_AT) or {}).get("attempts", 0) > 1,
        "the drained generator left in order": result["drained_said_goodbye"] and last <= DRAIN_AT + 1,
        "the frozen generator came back": bool(returned),
    }  # fmt: skip
    return {**result, "failed": [name for name, held in checks.items() if not held]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.members", description=__doc__)
    parser.add_argument("--policy", choices=["keep", "recompute"], help="only this weights.on_update")
    parser.add_argument("--versions", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--keep-folder", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="members-"))
    os.chdir(ROOT)
    results = []
    for policy in [options.policy] if options.policy else ["recompute", "keep"]:
        config, started = configure(policy, root, options.versions), time.monotonic()
        code = play(config)
        results.append(judge(config, code, time.monotonic() - started))
        if not options.json:
            for name, value in results[-1].items():
                print(f"{name}: {value}")
    if options.json:
        print(json.dumps(results, indent=2))
    failed = any(result["failed"] for result in results)
    if failed or options.keep_folder:
        print(f"everything lies in {root}", file=sys.stderr)
    else:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
