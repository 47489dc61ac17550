"""The broker beside bare redis-py, and the codec beside pickle: 32 KiB groups over a Unix socket, on our own Valkey.

    python -m benchmarks.broker [--rounds N] [--groups N] [--json]

Both sides use the same client, its settings and parser, the same server with the append-only file as in a run, and the
same batches of 16: submitting is one call a group, as generators do it, against one XADD of the same bytes; a batch is
taken and settled, against XREADGROUP and then XACK with XDEL in one pipeline. Rounds of ours and bare alternate, in
changing order, and ratios are medians over rounds: what disturbs the machine disturbs both. The last line of the output
is one JSON object.

- `submit_ratio`, `take_settle_ratio`: ours / bare, in groups per second. Neither side encodes or decodes. That a batch
  was trained, which is told in between and has no counterpart among the bare commands, is not in it.
- `take_step_settle_ratio`: it is in this, told in one call with the settling (`learner.settle_on: step`).
- `submit_with_codec_ratio`, `take_step_settle_with_codec_ratio`: the same, but ours starts from and ends with checked
  `Group` objects, while bare still moves bytes.
- `..._quartiles`: the middle half of the rounds.
- `codec_over_pickle`: time to encode and decode a group of 16 responses of 4096 tokens over that of pickle protocol 5.
- `size_over_raw`: bytes of that message over the bytes of its arrays.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from broker import Broker, Delivery, Lease, Server
from broker.clients import Endpoint, open_client
from common import wire
from common.config import BrokerConfig, Config
from common.trajectory import Group, Prompt, Response, VersionRun

BATCH = 16
STREAM, READERS = "bare:groups", "bare:readers"


def make_group(group_id: str, responses: int, tokens: int) -> Group:
    """A group of so many responses of so many tokens, with values like a model's and one weight update on the way."""
    rng = np.random.default_rng(0)
    return Group(
        group_id=group_id,
        prompt_ids=rng.integers(0, 150_000, 128, dtype=np.int32),
        responses=tuple(
            Response(
                token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
                logprobs=-rng.exponential(0.3, tokens).astype(np.float32),
                versions=(VersionRun(3, 0), VersionRun(4, tokens // 2)),
                finish_reason="stop",
                raw_reward=float(index % 2),
                reward=float(index % 2),
                correct=bool(index % 2),
            )
            for index in range(responses)
        ),
        generator="generator-0",
        temperature=1.0,
        sampled_at=time.time(),
        released_version=3,
    )


def raw_bytes(group: Group) -> int:
    """Bytes of the group's arrays."""
    return group.prompt_ids.nbytes + sum(each.token_ids.nbytes + each.logprobs.nbytes for each in group.responses)


def make_config(group_size: int, **sections: dict[str, Any]) -> Config:
    """A configuration of a run without a model."""
    tree: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"path": "none"},
        "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
        "reward": {"type": "reasoning_gym"},
        "sampling": {"group_size": group_size},
        **sections,
    }
    return Config.model_validate(tree)


@contextmanager
def server(maxmemory_mb: int = 1024) -> Iterator[Server]:
    """A server as `headrace up` starts it, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, Server(BrokerConfig(maxmemory_mb=maxmemory_mb)) as started:
        yield started.start(Path(folder))


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Ours:
    """The product's calls."""

    def __init__(self, where: Endpoint, group: Group) -> None:
        self.broker = Broker.connect(make_config(len(group.responses)), where)
        self.group, self.epoch, self.version = group, self.broker.begin(0, []), 0
        self.made: dict[str, Group] = {}

    def prepare(self, count: int) -> list[tuple[Lease, Group]]:
        """Leases, and the group for each."""
        position = self.broker.position()
        prompts = [Prompt(f"{position + i:09d}", self.group.prompt_ids, "") for i in range(count)]
        self.broker.release(prompts, position)
        leases = self.broker.lease("generator-0", count, 0)
        groups = [replace(self.group, group_id=lease.prompt.group_id) for lease in leases]
        self.made.update((group.group_id, group) for group in groups)
        return list(zip(leases, groups, strict=True))

    def submit(self, prepared: list[tuple[Lease, Group]]) -> None:
        for lease, group in prepared:
            self.broker.submit("generator-0", lease, group)

    def submit_bytes(self, prepared: list[tuple[Lease, Group]], payload: bytes) -> None:
        for lease, _ in prepared:
            self.broker._submit("generator-0", lease, payload)

    def take_step_settle(self) -> None:
        while deliveries := self.broker.take(self.epoch, BATCH, 0):
            self._step(deliveries, [each.group.group_id for each in deliveries])

    def take_step_settle_bytes(self) -> None:
        while deliveries := self._deliveries(self.broker._take(self.epoch, BATCH, 0)):
            self._step(deliveries, [each.group.group_id for each in deliveries])

    def take_settle_bytes(self) -> float:
        """Seconds it took, the steps between not counted."""
        steps = 0.0
        started = time.perf_counter()
        while entries := self.broker._take(self.epoch, BATCH, 0):
            steps += seconds(lambda: self._step(self._deliveries(entries)))
            self.broker.settle(self.epoch, [group_id for _, group_id, _, _ in entries])
        return time.perf_counter() - started - steps

    def _deliveries(self, entries: Sequence[tuple[str, str, bytes, int]]) -> list[Delivery]:
        return [Delivery(entry_id, self.made[group_id]) for entry_id, group_id, _, _ in entries]

    def _step(self, deliveries: list[Delivery], settle: Sequence[str] = ()) -> None:
        self.version += 1
        self.broker.step(self.epoch, self.version, deliveries, settle)


class Bare:
    """The same with plain commands of redis-py, on a client that was made in the same way."""

    def __init__(self, where: Endpoint, payload: bytes) -> None:
        self.client, self.payload = open_client(where, BrokerConfig()), payload
        self.client.xgroup_create(STREAM, READERS, id="0", mkstream=True)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self.client.xadd(STREAM, {"g": "000000000", "p": self.payload})

    def take(self) -> None:
        while reply := self.client.xreadgroup(READERS, "reader", {STREAM: ">"}, count=BATCH):
            ids = [entry_id for entry_id, _ in reply[0][1]]
            with self.client.pipeline(transaction=False) as pipe:
                pipe.xack(STREAM, READERS, *ids)
                pipe.xdel(STREAM, *ids)
                pipe.execute()


def measure_broker(rounds: int, count: int) -> dict[str, Any]:
    """Groups per second, and medians and quartiles of the ratios of rounds. The first round warms up."""
    group = make_group("000000000", responses=8, tokens=512)
    payload = wire.encode_group(group)
    times: dict[str, list[float]] = defaultdict(list)
    with server() as started:
        where = Endpoint(started.url, started.password)
        ours, bare = Ours(where, group), Bare(where, payload)
        for index in range(rounds + 1):
            leases = [ours.prepare(count) for _ in range(3)]
            # What was put in is taken out again.
            jobs: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = [
                ("submit", "take_settle", partial(ours.submit_bytes, leases[0], payload), ours.take_settle_bytes),
                ("", "take_step_settle", partial(ours.submit_bytes, leases[1], payload), ours.take_step_settle_bytes),
                ("bare_submit", "bare_take", partial(bare.submit, count), bare.take),
                ("codec_submit", "codec_take", partial(ours.submit, leases[2]), ours.take_step_settle),
            ]
            for submit_name, take_name, submit, take in jobs if index % 2 else jobs[::-1]:
                times[submit_name].append(seconds(submit))
                began = time.perf_counter()
                times[take_name].append(take() or time.perf_counter() - began)
        ledger = ours.broker.ledger()
        assert ledger.balanced and ledger.settled == 3 * (rounds + 1) * count, ledger
    rates = {name: count / np.array(values[1:]) for name, values in times.items() if name}
    ratios = {
        "submit_ratio": rates["submit"] / rates["bare_submit"],
        "take_settle_ratio": rates["take_settle"] / rates["bare_take"],
        "take_step_settle_ratio": rates["take_step_settle"] / rates["bare_take"],
        "submit_with_codec_ratio": rates["codec_submit"] / rates["bare_submit"],
        "take_step_settle_with_codec_ratio": rates["codec_take"] / rates["bare_take"],
    }
    return {
        **{name: round(float(np.median(values)), 3) for name, values in ratios.items()},
        **{f"{name}_quartiles": np.percentile(values, (25, 75)).round(3).tolist() for name, values in ratios.items()},
        **{f"{name}_groups_per_s": round(float(np.median(rate))) for name, rate in rates.items()},
        "rounds": rounds,
        "group_bytes": len(payload),
    }


def measure_codec(rounds: int) -> dict[str, float]:
    """The codec beside pickle, on a group of 16 responses of 4096 tokens; microseconds and ratios."""
    group = make_group("000000000", responses=16, tokens=4096)
    message, pickled = wire.encode_group(group), pickle.dumps(group, protocol=5)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append((seconds(lambda: wire.encode_group(group)), seconds(lambda: wire.decode_group(message, 16))))
        theirs.append((seconds(lambda: pickle.dumps(group, 5)), seconds(lambda: pickle.loads(pickled))))  # noqa: S301
    return {
        "codec_over_pickle": median(sum(a) / sum(b) for a, b in zip(ours, theirs, strict=True)),
        "size_over_raw": len(message) / raw_bytes(group),
        "encode_us": 1e6 * median(encode for encode, _ in ours),
        "decode_us": 1e6 * median(decode for _, decode in ours),
        "pickle_us": 1e6 * median(sum(each) for each in theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--groups", type=int, default=256, help="groups of a round")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    result = {**measure_broker(arguments.rounds, arguments.groups), **measure_codec(20 * arguments.rounds)}
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:42} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
