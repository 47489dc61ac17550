"""How long an update takes at sizes that cannot be measured here: formulas, a simulation of them, and small real cases.

    python -m benchmarks.scaling            # the table of docs/scaling.md, and the simulation of its 7B rows
    python -m benchmarks.scaling --check    # 1, 2 and 3 gloo receivers here: predicted against measured

S bytes, N receivers, interfaces of B bytes/s in each direction, pieces of b bytes, L seconds of latency a hop. Pieces
are pipelined: one is handed on while the next arrives.

    flat    the sender sends to every receiver.                     N S/B + L
    tree    two binary trees of depth d = ceil(log2(N + 1)), each   S/B + 2 (d - 1) b/B + d L
            with every other piece: who has children in one has
            none in the other, so nobody sends more than S.
    relay   every receiver hands on to the next.                    S/B + (N - 1) (b/B + L) + L

NCCL's broadcast is a relay too, its ring, with pieces of 512 KiB (its buffer of 4 MiB in 8 steps); NCCL's trees are for
all-reduce (src/graph/tuning.cc leaves the broadcast nothing but the ring).
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common.weightwire import GlooGroup

MODELS = {"7B": 7e9, "32B": 32e9, "235B": 235e9}  # parameters; two bytes each
GENERATORS = (8, 64, 512)
LINKS = {"100 Gbit/s": 100e9 / 8, "400 Gbit/s": 400e9 / 8}  # bytes/s
BUCKET = 64 << 20  # weights.bucket_mb
NCCL_PIECE = 512 << 10
LATENCY_S = 20e-6  # an assumption: a message between two hosts of a building

Edge = tuple[int, int]  # from, to; 0 is the sender


def flat_s(size: float, receivers: int, bandwidth: float, piece: float) -> float:
    return receivers * size / bandwidth + LATENCY_S


def tree_s(size: float, receivers: int, bandwidth: float, piece: float) -> float:
    depth = math.ceil(math.log2(receivers + 1))
    return size / bandwidth + 2 * (depth - 1) * piece / bandwidth + depth * LATENCY_S


def relay_s(size: float, receivers: int, bandwidth: float, piece: float) -> float:
    return size / bandwidth + (receivers - 1) * (piece / bandwidth + LATENCY_S) + LATENCY_S


Formula = Callable[[float, int, float, float], float]
WAYS: dict[str, tuple[Formula, float]] = {
    "flat": (flat_s, BUCKET),
    "tree": (tree_s, BUCKET),
    "NCCL's ring": (relay_s, NCCL_PIECE),
    "relay": (relay_s, BUCKET),
}


def table() -> str:
    """Seconds per update, as Markdown."""
    heads = [f"{way}, {link}" for link in LINKS for way in WAYS]
    lines = [f"| model | generators | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for model, parameters in MODELS.items():
        for receivers in GENERATORS:
            cells = [
                f"{formula(2 * parameters, receivers, bandwidth, piece):,.1f}"
                for bandwidth in LINKS.values()
                for formula, piece in WAYS.values()
            ]
            lines.append(f"| {model} | {receivers} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- simulation


def edges(way: str, receivers: int, piece: int) -> Iterator[Edge]:
    """Who sends piece number `piece` to whom, parents first."""
    if way == "flat":
        yield from ((0, child) for child in range(1, receivers + 1))
    elif way == "relay":
        yield from ((child - 1, child) for child in range(1, receivers + 1))
    else:
        # A heap has its leaves in the second half; counted backwards they come first.
        place: Callable[[int], int] = (lambda i: i) if piece % 2 else (lambda i: receivers + 1 - i)
        yield from ((place(i // 2) if i > 1 else 0, place(i)) for i in range(1, receivers + 1))


def simulate_s(way: str, size: float, receivers: int, bandwidth: float, piece: float) -> float:
    """Every piece over every interface, each of which does one thing at a time in each direction; who can send, sends.
    Without the latency."""
    pieces = math.ceil(size / piece)
    children: list[list[list[int]]] = []  # of each node, for pieces of each parity
    for parity in (0, 1):
        children.append([[] for _ in range(receivers + 1)])
        for parent, child in edges(way, receivers, parity):
            children[parity][parent].append(child)
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(receivers + 1)]  # (piece, child) to send
    waiting[0].extend((number, child) for number in range(pieces) for child in children[number % 2][0])
    sending, receiving = [False] * (receivers + 1), [False] * (receivers + 1)
    refused: list[list[int]] = [[] for _ in range(receivers + 1)]  # who wanted to send to a node that was busy
    events: list[tuple[float, int, int, int]] = []
    now = 0.0

    def start(node: int) -> None:
        """Send the first that can be sent."""
        for index, (number, child) in enumerate(waiting[node]) if not sending[node] else ():
            if not receiving[child]:
                del waiting[node][index]
                sending[node] = receiving[child] = True
                seconds = min(piece, size - number * piece) / bandwidth
                heapq.heappush(events, (now + seconds, number, node, child))
                return
            if node not in refused[child]:
                refused[child].append(node)
            if index == 2:  # looking further ahead does not help, and takes long
                return

    start(0)
    while events:
        now, number, node, child = heapq.heappop(events)
        sending[node] = receiving[child] = False
        waiting[child].extend((number, grandchild) for grandchild in children[number % 2][child])
        others, refused[child] = refused[child], []
        for one in (*others, node, child):
            start(one)
    return now


# --- small real cases

SIZE, PIECE = 32 << 20, 1 << 20  # bytes
SLOW = 32 << 20  # bytes/s: so slow that two cores are no bottleneck
LOOPBACK_SIZE = 256 << 20
TRIES = 5


def check() -> None:
    """Print predicted against measured, and by how much they differ."""
    print("one machine's loopback, gloo's broadcast of 256 MiB: every byte handed on takes the same cores, so N S / B")
    medians = {n: statistics.median(run("loopback", n)) for n in (1, 2, 3)}
    _compare("loopback", {n: n * medians[1] for n in medians}, medians)
    print("gloo messages, interfaces held to 32 MiB/s each, 32 MiB in pieces of 1 MiB")
    for way, formula in (("flat", flat_s), ("relay", relay_s), ("tree", tree_s)):
        medians = {n: statistics.median(run(way, n)) for n in (1, 2, 3)}
        _compare(way, {n: formula(SIZE, n, SLOW, PIECE) for n in medians}, medians)


def _compare(way: str, predicted: dict[int, float], measured: dict[int, float]) -> None:
    for receivers, seconds in measured.items():
        off = seconds / predicted[receivers] - 1
        print(f"| {way} | {receivers} | {predicted[receivers]:.3f} | {seconds:.3f} | {off:+.0%} |")


def run(way: str, receivers: int) -> list[float]:
    """Seconds until every receiver, a process each, has everything."""
    group = GlooGroup.listen("127.0.0.1", receivers + 1, 60)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_receiver, args=(way, group.port, rank, receivers)) for rank in range(1, receivers + 1)
    ]
    for process in processes:
        process.start()
    group.connect()
    seconds = _transfers(group, way, receivers)
    for process in processes:
        process.join()
    return seconds


def _receiver(way: str, port: int, rank: int, receivers: int) -> None:
    torch.set_num_threads(1)
    _transfers(GlooGroup.join("127.0.0.1", port, rank, receivers + 1, 60), way, receivers)


def _transfers(group: GlooGroup, way: str, receivers: int) -> list[float]:
    transfer = _loopback if way == "loopback" else _paced
    data = torch.ones(LOOPBACK_SIZE if way == "loopback" else SIZE, dtype=torch.uint8)
    out = []
    for _ in range(TRIES + 1):  # the first warms up
        group.barrier()
        started = time.monotonic()
        transfer(group, data, way, receivers)
        group.barrier()
        out.append(time.monotonic() - started)
    return out[1:]


def _loopback(group: GlooGroup, data: torch.Tensor, way: str, receivers: int) -> None:
    group.broadcast(data).wait()


def _paced(group: GlooGroup, data: torch.Tensor, way: str, receivers: int) -> None:
    """Receive each piece from its parent, hand it on to its children, one after the other through a slow interface."""
    pieces = data.split(PIECE)
    arrived: queue.Queue[int] = queue.Queue()
    link: Any = group._group
    parents = [
        next((parent for parent, child in edges(way, receivers, number) if child == group.rank), None)
        for number in range(len(pieces))
    ]

    def receive() -> None:
        for number, parent in enumerate(parents):
            if parent is not None:
                link.recv([pieces[number]], parent, number).wait()
            arrived.put(number)

    thread = threading.Thread(target=receive)
    thread.start()
    free = time.monotonic()
    for _ in pieces:
        number = arrived.get()
        for parent, child in edges(way, receivers, number):
            if parent == group.rank:
                free = max(free, time.monotonic()) + PIECE / SLOW
                time.sleep(max(0.0, free - time.monotonic()))
                link.send([pieces[number]], child, number).wait()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="measure the small cases")
    if parser.parse_args().check:
        torch.set_num_threads(1)
        check()
        return
    print(table())
    print()
    size, bandwidth = 2 * MODELS["7B"], LINKS["100 Gbit/s"]
    for way, formula in (("flat", flat_s), ("tree", tree_s), ("relay", relay_s)):
        for receivers in (1, 2, 3, *GENERATORS):
            seconds = formula(size, receivers, bandwidth, BUCKET)
            simulated = simulate_s(way, size, receivers, bandwidth, BUCKET)
            print(f"7B, {way}, {receivers}: formula {seconds:.3f} s, simulation {simulated:.3f} s")


if __name__ == "__main__":
    main()
