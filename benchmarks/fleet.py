"""A fleet without models: real broker, codec, feeder and release budget; simulated engines and a simulated learner.

    python -m benchmarks.fleet [--generators 256] [--learner-ranks 8] [--points 1,2,4] [--quick] [--json]

Engines answer after log-normal times, with lengths to match; a share of the groups is filtered; some generators crash
with their leases in hand, which the reclaimer takes back; weights change under running responses. The learner takes
batches as large as what is in flight (docs/concepts.md says why), a step takes as long as its ranks need, and it
settles every few steps. Seconds of the engines are compressed (a mean answer takes two); every call of the broker is
real, heartbeats and renewals included. A fleet's learner grows with it, in the proportion of the two options:
`points` are fleets of 1, 2, 4, ... generators, up to 512. Small ones are watched for longer, up to a minute, since
they give few groups.

The last line is one JSON object: the fleet that was asked for, `points`, and `saturates_at`, the first point from which
on all are more than 10 % below linear, which is the rate of engines that never wait.

- `groups_per_s`: groups that reached the learner's stream. `filtered_per_s` come on top.
- `staleness`: trained tokens by age in versions; `masked_share`: the share of tokens that was too old to train.
- `broker_cpu_us_per_group`: CPU time of the broker service, for each prompt that ended.
- `valkey_cpu_us_per_group`, `valkey_cpu_share` (of one core), `valkey_mb`: the server's.
- `engine_late_ms`: how late the simulated engines were, mean; where it is much of a second, this machine is what
  saturated, not the broker.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import logging
import multiprocessing
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.broker import make_config, server
from broker import Broker, Lease, Member
from broker.clients import Endpoint, open_client
from broker.feeder import Feeder
from broker.records import Delivery, Ledger
from broker.sources import Sourced
from common.config import BrokerConfig, Config
from common.trajectory import Group, Prompt, Response, VersionRun

GROUP_SIZE, MEAN_TOKENS, LONGEST = 8, 512, 4096
IN_FLIGHT, SIGMA, FILTERED, CRASHES = 2, 0.8, 0.4, 0.002
MEAN_S = 2.0  # a prompt, mean; in truth tens of seconds
RATE = IN_FLIGHT * (1 - FILTERED) / MEAN_S  # groups a second of one engine that never waits
LEARNER_LOAD, GENERATORS_PER_RANK = 0.7, 32  # share of the time a learner of one rank for so many generators is busy
SETTLE_EVERY = 5
GROUPS = 150  # that a point is watched for, unless it takes too long
GENERATOR_PROCESSES, THREADS = 2, 4
TOKENS = np.random.default_rng(0).integers(0, 150_000, LONGEST, dtype=np.int32)
LOGPROBS = -np.random.default_rng(0).exponential(0.3, LONGEST).astype(np.float32)
_Process = multiprocessing.get_context("fork")


class Prompts:
    """A source without end."""

    def __getitem__(self, position: int) -> Sourced:
        return Sourced(TOKENS[:128], f"question {position}", {"answer": str(position)})


@dataclass
class Point:
    """One fleet, and the events that begin and end its parts."""

    config: Config
    where: Endpoint
    generators: int
    step_s: float
    stop: Any = field(default_factory=_Process.Event)
    results: Any = field(default_factory=_Process.Queue)

    def connect(self) -> Broker:
        return Broker.connect(self.config, self.where)


class Versions:
    """The policy versions an engine had, and since when."""

    def __init__(self) -> None:
        self.since, self.versions = [0.0], [0]

    def see(self, version: int) -> None:
        if version != self.versions[-1]:
            self.since.append(time.monotonic())
            self.versions.append(version)

    def runs(self, started: float, ended: float, tokens: int) -> tuple[VersionRun, ...]:
        """Of a response that was sampled evenly from `started` to `ended`."""
        first, last = bisect.bisect_right(self.since, started) - 1, bisect.bisect_right(self.since, ended)
        runs: list[VersionRun] = []
        for version, since in zip(self.versions[first:last], self.since[first:last], strict=True):
            start = max(0, int(tokens * (since - started) / (ended - started)))
            if start < tokens and (not runs or start > runs[-1].start):
                runs.append(VersionRun(version, start))
        return tuple(runs)


class Engines:
    """Some generators in one thread: a calendar of what they do next."""

    def __init__(self, point: Point, names: list[str], seed: int) -> None:
        self.point, self.rng, self.broker = point, random.Random(seed), point.connect()
        self.versions, self.held = Versions(), {name: dict[str, Lease]() for name in names}
        self.calendar: list[tuple[float, int, Any]] = []
        self.idle: deque[str] = deque()
        self.number = 0

    def at(self, delay: float, action: Any) -> None:
        self.number += 1
        heapq.heappush(self.calendar, (time.monotonic() + delay, self.number, action))

    def run(self) -> None:
        self.at(0, self.look)
        self.at(0, self.serve_idle)
        for name in list(self.held):
            self.at(self.rng.random(), lambda name=name: self.beat(name))
            for _ in range(IN_FLIGHT):
                self.at(self.rng.random() * 0.1, lambda name=name: self.lease(name))
        late_s, events = 0.0, 0
        while not self.point.stop.is_set():
            wait = self.calendar[0][0] - time.monotonic()
            if wait > 0:
                self.point.stop.wait(min(wait, 0.1))
            else:
                late_s, events = late_s - wait, events + 1
                heapq.heappop(self.calendar)[2]()
        self.broker.close()
        self.point.results.put(("late", (late_s, events)))

    def look(self) -> None:
        self.versions.see(self.broker.version())
        self.at(0.1, self.look)

    def beat(self, name: str) -> None:
        if name in self.held:
            self.broker.heartbeat(Member(name, "generator", "serving", self.versions.versions[-1]))
            self.broker.renew(name, list(self.held[name]))
            self.at(self.point.config.broker.heartbeat_s, lambda: self.beat(name))

    def lease(self, name: str) -> None:
        """Begin a prompt, or wait in line for one: the line is looked at as one, as a blocking read would serve it."""
        if name in self.held and (self.idle or not self.begin(name)):
            self.idle.append(name)

    def serve_idle(self) -> None:
        while self.idle and (self.idle[0] not in self.held or self.begin(self.idle[0])):
            self.idle.popleft()
        self.at(0.05, self.serve_idle)

    def begin(self, name: str) -> bool:
        leases = self.broker.lease(name, 1, 0)
        if not leases:
            return False
        self.held[name][leases[0].entry_id] = leases[0]
        started, took = time.monotonic(), MEAN_S * self.rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)
        self.at(took, lambda: self.done(name, leases[0], started, took))
        return True

    def done(self, name: str, lease: Lease, started: float, took: float) -> None:
        if name not in self.held:  # its generator crashed
            return
        if self.rng.random() < CRASHES:
            del self.held[name]
            again = f"{name}x"
            self.held[again] = {}
            self.at(0.5, lambda: self.beat(again))
            for _ in range(IN_FLIGHT):
                self.at(0.5, lambda: self.lease(again))
            return
        if self.rng.random() < FILTERED:
            self.broker.filtered(name, lease.entry_id, "wrong")
        else:
            self.broker.submit(name, lease, self.group(name, lease.prompt, started, took))
        del self.held[name][lease.entry_id]
        self.lease(name)

    def group(self, name: str, prompt: Prompt, started: float, took: float) -> Group:
        longest = min(LONGEST, max(1, int(MEAN_TOKENS * took / MEAN_S)))
        responses = []
        for index in range(GROUP_SIZE):
            tokens = longest if index == 0 else max(1, int(longest * self.rng.uniform(0.5, 1.0)))
            runs = self.versions.runs(started, started + took * tokens / longest, tokens)
            reward = float(index % 2)
            responses.append(Response(TOKENS[:tokens], LOGPROBS[:tokens], runs, "stop", reward, reward, index % 2 == 1))
        return Group(
            prompt.group_id, prompt.token_ids, tuple(responses), name, 1.0, time.time(), prompt.released_version
        )


def run_generators(point: Point, process: int) -> None:
    names = [f"generator-{i}" for i in range(point.generators) if i % GENERATOR_PROCESSES == process]
    engines = [Engines(point, names[i::THREADS], 100 * process + i) for i in range(THREADS) if names[i::THREADS]]
    threads = [threading.Thread(target=each.run) for each in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_service(point: Point) -> None:
    """What the broker service does; reports the CPU time of its process."""
    broker = point.connect()
    stop = threading.Event()
    feeder = threading.Thread(target=Feeder(broker, Prompts(), logging.getLogger("fleet")).run, args=(stop,))  # type: ignore[arg-type]
    feeder.start()
    while not point.stop.is_set():
        broker.heartbeat(Member("broker", "broker", "serving", broker.version()))
        broker.reclaim()
        point.stop.wait(point.config.broker.heartbeat_s)
    stop.set()
    feeder.join()
    point.results.put(("cpu", time.process_time()))
    broker.close()


def run_learner(point: Point) -> None:
    """Takes, trains (waits), settles; reports how old the tokens were."""
    broker, ages, masked, version = point.connect(), Counter[int](), 0, 0
    most, batch = point.config.staleness.max_staleness, point.config.learner.groups_per_step
    epoch, pending, trained = broker.begin(0, []), list[Delivery](), list[str]()
    while not point.stop.is_set():
        for delivery in broker.take(epoch, batch, 100):
            newest = max(run.version for response in delivery.group.responses for run in response.versions)
            if version - newest > most:
                broker.expire(epoch, [delivery])
            else:
                pending.append(delivery)
        if len(pending) < batch:
            continue
        taken, pending = pending[:batch], pending[batch:]
        for delivery in taken:
            for response in delivery.group.responses:
                found, counts = np.unique(version - response.token_versions(), return_counts=True)
                for age, count in zip(found.tolist(), counts.tolist(), strict=True):
                    if age > most:
                        masked += count
                    else:
                        ages[age] += count
        point.stop.wait(point.step_s)
        version += 1
        broker.step(epoch, version, taken)
        trained += [delivery.group.group_id for delivery in taken]
        if version % SETTLE_EVERY == 0:
            broker.settle(epoch, trained)
            trained.clear()
    point.results.put(("learner", (dict(ages), masked, version)))
    broker.close()


def measure(where: Endpoint, generators: int, load: float, warm_s: float, window_s: float) -> dict[str, Any]:
    """One fleet; `load` is the share of the time its learner would be busy if the engines never waited."""
    config = make_config(
        GROUP_SIZE,
        run={"name": f"fleet-{generators}"},
        sampling={"group_size": GROUP_SIZE, "max_response_tokens": LONGEST},
        learner={"groups_per_step": IN_FLIGHT * generators, "micro_batch_tokens": 8192},
        broker={"member_ttl_s": 5.0},
    )
    point = Point(config, where, generators, step_s=load * IN_FLIGHT / RATE)
    jobs = [(run_service, (point,)), (run_learner, (point,))]
    jobs += [(run_generators, (point, process)) for process in range(GENERATOR_PROCESSES)]  # type: ignore[misc]
    processes = [_Process.Process(target=target, args=arguments) for target, arguments in jobs]
    for process in processes:
        process.start()
    broker = point.connect()
    deadline = time.monotonic() + 4 * warm_s
    time.sleep(warm_s)
    while broker.version() == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    begin = (time.monotonic(), broker.ledger(), broker._client.info())
    time.sleep(window_s)
    end = (time.monotonic(), broker.ledger(), broker._client.info())
    point.stop.set()
    threads = sum(min(THREADS, len(range(i, generators, GENERATOR_PROCESSES))) for i in range(GENERATOR_PROCESSES))
    reports = [point.results.get(timeout=60) for _ in range(2 + threads)]
    for process in processes:
        process.join(30)
    ledger = broker.ledger()
    assert ledger.balanced, f"the ledger of {generators} generators does not balance: {ledger}"
    broker._client.delete(*broker._client.keys(broker.keys.prefix + "*"))
    broker.close()
    return {"generators": generators, **_figures(begin, end, ledger, reports)}


def _figures(begin: Any, end: Any, last: Ledger, reports: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rates and the server's figures are of the window from `begin` to `end`, the others of the whole run."""
    seconds = end[0] - begin[0]
    submitted, filtered = end[1].submitted - begin[1].submitted, end[1].filtered - begin[1].filtered
    ended = max(1, submitted + filtered)
    server_cpu = sum(end[2][name] - begin[2][name] for name in ("used_cpu_user", "used_cpu_sys"))
    of = dict(reports)
    ages, masked, versions = of["learner"]
    late_s, events = map(sum, zip(*(each for name, each in reports if name == "late"), strict=True))
    tokens = sum(ages.values())
    return {
        "groups_per_s": round(submitted / seconds, 2),
        "filtered_per_s": round(filtered / seconds, 2),
        "versions": versions,
        "staleness": {str(age): round(count / max(1, tokens), 4) for age, count in sorted(ages.items())},
        "max_staleness": max(ages, default=0),
        "masked_share": round(masked / max(1, masked + tokens), 4),
        "expired_groups": last.expired,
        "broker_cpu_us_per_group": round(1e6 * of["cpu"] / max(1, last.submitted + last.filtered), 1),
        "valkey_cpu_us_per_group": round(1e6 * server_cpu / ended, 1),
        "valkey_cpu_share": round(server_cpu / seconds, 3),
        "valkey_mb": round(end[2]["used_memory"] / 2**20, 1),
        "engine_late_ms": round(1e3 * late_s / max(1, events), 1),
    }


def saturation(points: list[dict[str, Any]]) -> int | None:
    """Generators of the first point from which on all are more than 10 % below linear; None where the last is not."""
    first = None
    for point in reversed(points):
        if point["groups_per_s"] >= 0.9 * RATE * point["generators"]:
            break
        first = point["generators"]
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--generators", type=int, default=256)
    parser.add_argument("--learner-ranks", type=int, default=8)
    parser.add_argument("--points", type=lambda text: [int(each) for each in text.split(",")], help="other fleets")
    parser.add_argument("--quick", action="store_true", help="three points, a few seconds each")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    load = LEARNER_LOAD * arguments.generators / (GENERATORS_PER_RANK * arguments.learner_ranks)
    sizes = arguments.points or ([4, 32] if arguments.quick else [2**power for power in range(10)])
    sizes = sizes if arguments.points else sorted({*sizes, arguments.generators})
    warm_s, window_s = (1.5, 4.0) if arguments.quick else (4.0, 10.0)
    points = []
    with server(maxmemory_mb=4096) as started:
        where = Endpoint(started.url, started.password)
        open_client(where, BrokerConfig()).close()
        for generators in sizes:
            longer_s = window_s if arguments.quick else min(60.0, max(window_s, GROUPS / (RATE * generators)))
            points.append(measure(where, generators, load, warm_s, longer_s))
            if not arguments.json:
                print(json.dumps(points[-1]), flush=True)
    asked = next((point for point in points if point["generators"] == arguments.generators), points[-1])
    saturates = saturation(points)
    print(json.dumps({**asked, "linear_per_generator": RATE, "saturates_at": saturates, "points": points}))


if __name__ == "__main__":
    main()
