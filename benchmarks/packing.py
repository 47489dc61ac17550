"""How even the ranks' work is, how much of it is padding, and how long planning takes.

    python -m benchmarks.packing [--json]

Steps of 64 groups of 8 responses with a shared prompt, 8 ranks in lock-step, rows of at most 16,384 tokens. By
distribution of the response lengths (log-normal with sigma 1, bimodal, all equal): the sum over lock-steps of the
slowest rank's cost, over the whole cost / 8, all steps together (`lockstep_over_ideal`) and of the worst
(`worst_step`); the same over the cost of computing every prompt just once (`over_prompts_once`: balance is also paid
for in repeated prompts); and tokens in the packed rows that are neither prompt nor response, over all
(`padding_waste`). The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray

from common.trajectory import Float32Array
from learner.batch import Counts, Step, TrainGroup, TrainSequence, sequence_scale
from learner.layout import layout
from learner.packing import plan
from learner.parts import Part

RANKS, LIMIT, GROUP = 8, 16_384, 8
SEQUENCES, MANY = 512, 8192
RATIOS = {"lockstep_over_ideal": ("slowest", "even"), "over_prompts_once": ("slowest", "once")}


def lengths(kind: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Response lengths in tokens, (count,)."""
    if kind == "log_normal":
        drawn = rng.lognormal(np.log(512), 1.0, count)
    elif kind == "bimodal":
        drawn = np.where(rng.random(count) < 0.5, rng.normal(256, 32, count), rng.normal(4096, 256, count))
    else:
        drawn = np.full(count, 1024.0)
    return np.clip(drawn, 16, 8192).astype(np.int64)


def make_step(kind: str, count: int, seed: int) -> Step:
    """A step of `count` responses, in groups, whose prompts have 64 to 256 tokens (all equal: 128)."""
    rng = np.random.default_rng(seed)
    groups = []
    drawn = lengths(kind, count, rng).reshape(-1, GROUP)
    for number, row in enumerate(drawn):
        prompt = 128 if kind == "equal" else int(rng.integers(64, 257))
        sequences = tuple(_sequence(number * GROUP + place, int(length)) for place, length in enumerate(row))
        groups.append(TrainGroup(str(number), np.ones(prompt, np.int32), sequences))
    tokens, prompts = drawn.flatten(), np.repeat(np.arange(len(drawn)), GROUP)
    scale = sequence_scale(tokens, prompts, "token_mean")
    return Step(tuple(groups), tokens, prompts, scale, Counts())


def _sequence(index: int, tokens: int) -> TrainSequence:
    logp: Float32Array = np.zeros(tokens, np.float32)
    versions = np.zeros(tokens, np.int64)
    return TrainSequence(index, np.ones(tokens, np.int32), logp, versions, np.ones(tokens, bool), 1.0, versions, 1.0)


def balance(step: Step) -> dict[str, float]:
    """How even the plan of the step is."""
    lock_steps = layout(step, RANKS, LIMIT)
    costs = np.array([[sum(part.cost for part in row) for row in lock_step] for lock_step in lock_steps])
    once = sum(Part.of(group, group.sequences).cost for group in step.groups)
    slowest = float(costs.max(1).sum())
    rows = [row for share in plan(step, RANKS, LIMIT) for row in share if len(row.targets)]
    assert max(len(row.input_ids) for row in rows) <= LIMIT
    useful = sum(part.tokens for lock_step in lock_steps for row in lock_step for part in row)
    return {
        "slowest": slowest,
        "even": float(costs.sum()) / RANKS,
        "once": once / RANKS,
        "padding": 1 - useful / sum(len(row.input_ids) for row in rows),
    }


def milliseconds(kind: str) -> tuple[float, float]:
    """Planning `MANY` sequences, the fastest of seven times, and laying them out in arrays as well, once."""
    step = make_step(kind, MANY, 0)
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        layout(step, RANKS, LIMIT)
        taken.append(time.perf_counter() - started)
    started = time.perf_counter()
    plan(step, RANKS, LIMIT)
    packed = time.perf_counter() - started
    return 1e3 * min(taken), 1e3 * packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    parser.add_argument("--steps", type=int, default=5, help="drawn of every distribution")
    arguments = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for kind in ("log_normal", "bimodal", "equal"):
        drawn = [balance(make_step(kind, SEQUENCES, seed)) for seed in range(arguments.steps)]
        total = {key: sum(each[key] for each in drawn) for key in drawn[0]}
        for key, (above, below) in RATIOS.items():
            result.setdefault(key, {})[kind] = total[above] / total[below]
        result.setdefault("worst_step", {})[kind] = max(each["slowest"] / each["even"] for each in drawn)
        result.setdefault("padding_waste", {})[kind] = max(each["padding"] for each in drawn)
        for key, taken in zip(("plan_8192_ms_by_kind", "plan_and_pack_8192_ms"), milliseconds(kind), strict=True):
            result.setdefault(key, {})[kind] = taken
    record = {
        **result,
        "plan_8192_ms": max(result["plan_8192_ms_by_kind"].values()),
        "sequences": SEQUENCES,
        "ranks": RANKS,
        "limit": LIMIT,
    }
    if not arguments.json:
        for name, value in record.items():
            print(f"{name:24} {value}")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
