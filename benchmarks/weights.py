"""What a weight update costs, against what the same bytes cost without Headrace: SmolLM2 in float32, one vLLM engine.

    python -m benchmarks.weights [--json]

The learner's end is this process (the real publisher, weights as a trainer hands them over); g1 is a real vLLM engine
that samples eight requests while it is measured; g2, g3 and, for the joins, g4 are light: the real receive code without
an engine, because the machine has two cores. The references are measured in the same run:

- raw gloo: plain broadcasts of as many bytes to the same three processes, into memory that is there already; the faster
  of one piece and buckets;
- load: vLLM's own `reload_weights` of the same tensors when they lie in its worker's memory;
- copy: `copy_` of the same tensors into a buffer of the type that is sent.

Medians, with the least and the greatest. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import weights_peers
from broker import Broker, Server
from common.config import Config
from common.log import setup
from common.weightwire import GlooGroup
from learner.publisher import PublishTimings, WeightPublisher

MODEL = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
REPEATS = 5
JOINS = 3
STARTED = time.monotonic()
QUIET_S = 1.0  # of undisturbed sampling around every update

Times = list[tuple[float, int]]


class Peer:
    """A receiver's process, from here."""

    def __init__(self, config: Config, name: str, light: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=weights_peers.main, args=(theirs, config, name, light))
        self.process.start()

    def tell(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, *arguments))

    def result(self) -> Any:
        if not self._pipe.poll(300):
            raise RuntimeError("a receiver does not answer")
        value, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return value

    def ask(self, method: str, *arguments: object) -> Any:
        self.tell(method, *arguments)
        return self.result()


@dataclass
class Sample:
    """One update. `gap_s`: the longest that no request got a token; `lost_s`: sampling time lost from `publish` until
    every generator had changed over, at the rate of the undisturbed second before."""

    blocked_s: float
    copy_s: float
    timings: PublishTimings
    stall_s: float
    gap_s: float = 0.0
    lost_s: float = 0.0

    @property
    def transfer_s(self) -> float:
        return self.timings.send_s - self.timings.settle_s


@dataclass
class Bench:
    """The learner's end."""

    publisher: WeightPublisher
    peers: dict[str, Peer]
    weights: list[tuple[str, torch.Tensor]]
    sampling: bool = False
    version: int = -1
    buffers: dict[torch.dtype, list[torch.Tensor]] = field(default_factory=dict)

    def plain_copy_s(self, dtype: torch.dtype) -> float:
        if dtype not in self.buffers:
            flat = torch.zeros(sum(tensor.numel() for _, tensor in self.weights), dtype=dtype)
            sizes = [tensor.numel() for _, tensor in self.weights]
            pieces = flat.split(sizes)
            self.buffers[dtype] = [piece.view(t.shape) for piece, (_, t) in zip(pieces, self.weights, strict=True)]
        started = time.monotonic()
        for target, (_, tensor) in zip(self.buffers[dtype], self.weights, strict=True):
            target.copy_(tensor)
        return time.monotonic() - started

    def quiet(self) -> None:
        """A second of undisturbed sampling, once the requests' prefill, also that after an update, is through."""
        while not self.peers["g1"].ask("times"):
            time.sleep(0.05)
        time.sleep(QUIET_S)

    def update(self, dtype: torch.dtype = torch.float32) -> Sample:
        """Publish a version and wait until everybody has changed over."""
        engine = self.peers["g1"]
        if self.sampling:
            self.quiet()
        copy_s = self.plain_copy_s(dtype)
        self.version += 1
        started = time.monotonic()
        self.publisher.publish(self.version, self.weights, dtype)
        blocked_s = time.monotonic() - started
        self.publisher.wait(60)
        ended = time.monotonic()
        timings = self.publisher.timings
        assert timings is not None and timings.version == self.version and timings.dropped == 0
        copy_s = (copy_s + self.plain_copy_s(dtype)) / 2  # before and after
        seconds = engine.ask("seconds")
        sample = Sample(blocked_s, copy_s, timings, sum(value for part, value in seconds.items() if part != "stage"))
        if self.sampling:
            time.sleep(0.3)  # the first step after the update is part of the gap
            times: Times = engine.ask("times")
            sample.gap_s = longest_gap(times, started, time.monotonic())
            sample.lost_s = lost_s(times, started, ended)
        say(
            f"version {self.version}: blocked {blocked_s:.3f} of {copy_s:.3f}, transfer {sample.transfer_s:.3f}, "
            f"prepare {timings.settle_s:.3f}, stall {sample.stall_s:.3f}, gap {sample.gap_s:.3f}, "
            f"lost {sample.lost_s:.3f}"
        )
        return sample

    def join(self) -> dict[str, float]:
        """g4 joins while the others sample, takes part in one update, and leaves."""
        engine, newcomer = self.peers["g1"], self.peers["g4"]
        self.quiet()
        started = newcomer.ask("join")
        ended = newcomer.ask("holds", self.version)
        time.sleep(0.1)
        times: Times = engine.ask("times")
        after = self.update()
        newcomer.ask("leave")
        say(f"joined in {ended - started:.3f} s, next group formed in {after.timings.form_s:.3f} s")
        quiet = longest_gap(times, started - QUIET_S, started)
        return {
            "serving_s": ended - started,
            "gap_s": max(0.0, longest_gap(times, started, ended) - quiet),
            "lost_s": lost_s(times, started, ended),
            "form_s": after.timings.form_s,
            "stall_s": after.stall_s,
            "members": float(after.timings.members),
        }

    def raw_gloo_s(self, pieces: list[int]) -> list[float]:
        names = ["g1", "g2", "g3"]
        world_size = 1 + len(names)
        group = GlooGroup.listen("127.0.0.1", world_size, 30)
        for rank, name in enumerate(names, 1):
            self.peers[name].tell("raw", group.port, rank, world_size, pieces, REPEATS)
        group._store.set("here/0", "1")
        group.connect()
        out = weights_peers.raw_broadcast(group, pieces, REPEATS)
        for name in names:
            self.peers[name].result()
        return out


def longest_gap(times: Times, start: float, end: float) -> float:
    """Longest time in [start, end] in which no token came."""
    inside = [start, *(at for at, _ in times if start <= at <= end), end]
    return max(b - a for a, b in itertools.pairwise(inside))


def lost_s(times: Times, start: float, end: float) -> float:
    """How much sampling time is missing in [start, end], at the rate of the undisturbed time before."""
    rate = sum(n for at, n in times if start - QUIET_S <= at < start) / QUIET_S
    return (end - start) - sum(n for at, n in times if start <= at < end) / rate


@contextmanager
def opened(folder: Path) -> Iterator[Bench]:
    """Server, publisher and receivers, with the first version delivered."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `load` hands vLLM's worker a function
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as generator.engine sets it, for the light receivers too
    with ExitStack() as stack:
        server = stack.enter_context(Server().start(folder / "valkey"))
        config = Config.model_validate(
            {
                "run": {"name": "weights", "id": f"weights-{uuid.uuid4().hex[:8]}", "dir": folder},
                "model": {"path": str(MODEL)},
                "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
                "reward": {"type": "reasoning_gym"},
                "sampling": {"max_prompt_tokens": 64, "max_response_tokens": weights_peers.TOKENS},
                "generator": {"dtype": "float32", "kv_cache_mb": 256, "max_num_seqs": 16},
                "weights": {"backend": "gloo", "timeout_s": 30},
                "broker": {
                    "url": server.url, "password_file": server.password_file, "heartbeat_s": 0.2, "member_ttl_s": 3,
                },
            }
        )  # fmt: skip
        peers = {name: Peer(config, name, light=name != "g1") for name in ("g1", "g2", "g3", "g4")}
        stack.callback(end, peers)
        for peer in peers.values():
            peer.tell("start")
        weights = [(name, tensor.float()) for name, tensor in load_file(MODEL / "model.safetensors").items()]
        for peer in peers.values():
            peer.result()
        for name in ("g1", "g2", "g3"):
            peers[name].ask("join")
        broker = Broker.connect(config)
        stack.callback(broker.close)
        while sum(member.state == "syncing" for member in broker.members("generator")) < 3:
            time.sleep(0.05)
        publisher = WeightPublisher(broker, config, setup("weights", "learner", level=30))
        stack.callback(publisher.close)
        bench = Bench(publisher, peers, weights)
        bench.update()
        yield bench


def end(peers: dict[str, Peer]) -> None:
    for peer in peers.values():
        if peer.process.is_alive():
            peer.tell("stop")
    for peer in peers.values():
        peer.process.join(30)
        if peer.process.is_alive():
            assert peer.process.pid is not None
            os.killpg(peer.process.pid, signal.SIGKILL)  # vLLM's processes too


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def say(what: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {what}", file=sys.stderr, flush=True)


def measure(bench: Bench) -> dict[str, Any]:
    """All figures; an update of each kind warms up first."""
    engine = bench.peers["g1"]
    say("engine idle")
    idle = [bench.update() for _ in range(REPEATS)]
    converted = [bench.update(torch.bfloat16) for _ in range(4)][1:]
    sizes = [tensor.nbytes for _, tensor in bench.weights]
    bucket = bench.publisher.config.weights.bucket_mb << 20
    total = sum(sizes)
    pieces = [bucket] * (total // bucket) + ([total % bucket] if total % bucket else [])
    say("references")
    raw = min((bench.raw_gloo_s([total]), bench.raw_gloo_s(pieces)), key=statistics.median)
    say(f"raw gloo {raw}")
    load = engine.ask("load", REPEATS + 1)[1:]
    say(f"load {load}")
    engine.ask("generate", True)
    bench.sampling = True
    say("sampling, staging on")
    on = [bench.update() for _ in range(REPEATS)]
    say("joins")
    joins = [bench.join() for _ in range(JOINS)]
    engine.ask("staging", False)
    say("sampling, staging off")
    off = [bench.update() for _ in range(REPEATS)]
    return result(total, idle, converted, raw, load, on, off, joins)


def result(
    total: int,
    idle: list[Sample],
    converted: list[Sample],
    raw: list[float],
    load: list[float],
    on: list[Sample],
    off: list[Sample],
    joins: list[dict[str, float]],
) -> dict[str, Any]:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    stall = median([sample.stall_s for sample in on])
    # What the others notice of a join: a pause of their tokens, a longer stall at the next update, and its weights
    # later by the forming of the larger group.
    delays = [join["gap_s"] + max(0.0, join["stall_s"] - stall) + join["form_s"] for join in joins]
    return {
        "bytes": total,
        "receivers": 3,
        "stall_over_load": stall / median(load),
        "sender_blocked_over_copy": median([s.blocked_s for s in idle]) / median([s.copy_s for s in idle]),
        "transfer_over_gloo": median(raw) / median([s.transfer_s for s in idle]),
        "join_delay_over_stall": median(delays) / stall,
        "join_pause_over_stall": median([join["gap_s"] for join in joins]) / stall,
        "sender_blocked_over_copy_bf16": median([s.blocked_s for s in converted])
        / median([s.copy_s for s in converted]),
        "stall_off_over_load": median([sample.stall_s for sample in off]) / median(load),
        "load_s": spread(load),
        "raw_gloo_s": spread(raw),
        "copy_s": spread([s.copy_s for s in idle]),
        "blocked_s": spread([s.blocked_s for s in idle]),
        "transfer_s": spread([s.transfer_s for s in idle]),
        "transfer_while_sampling_s": spread([s.transfer_s for s in on]),
        "prepare_s": spread([s.timings.settle_s for s in on]),
        "stall_s": spread([s.stall_s for s in on]),
        "stall_off_s": spread([s.stall_s for s in off]),
        "token_gap_s": spread([s.gap_s for s in on]),
        "token_gap_off_s": spread([s.gap_s for s in off]),
        "lost_s": spread([s.lost_s for s in on]),
        "lost_off_s": spread([s.lost_s for s in off]),
        "join_delay_s": spread(delays),
        **{f"join_{key}": spread([join[key] for join in joins]) for key in ("serving_s", "gap_s", "lost_s", "form_s")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # What vLLM's processes print must not mix with the figures.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(sys.stderr.fileno(), 1)
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as bench:
        figures = measure(bench)
    if not arguments.json:
        for key, value in figures.items():
            text = " ".join(f"{n} {v:.3f}" for n, v in value.items()) if isinstance(value, dict) else f"{value:.3f}"
            print(f"{key:32} {text}", file=out)
    print(json.dumps(figures), file=out, flush=True)


if __name__ == "__main__":
    main()
