"""`python -m tests.chaos --seeds 5 --kills 200`: kill everything at random; nothing may be lost or trained twice.

Exit code 0: every invariant held under every seed. A seed that failed is named with its folder, which is kept.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import partition
from tests.chaos.world import VICTIMS, Plan, Result, World
from tests.chaos.zygote import Zygote

COLUMNS = (
    "seed", "durability", *VICTIMS, "paused", "cut off", "learners", "versions", "trained", "again", "duplicates",
    "expired", "dead", "staleness", "samples", "seconds", "verdict",
)  # fmt: skip


def row(result: Result) -> list[str]:
    verdict, ledger = result.verdict, result.verdict.ledger
    return [
        str(result.plan.seed), result.plan.durability, *(str(result.kills[victim]) for victim in VICTIMS),
        str(result.pauses), str(result.cuts), str(verdict.lineages), str(verdict.versions), str(verdict.trained),
        str(verdict.again), str(ledger.duplicates), str(ledger.expired), str(ledger.dead), str(verdict.staleness),
        str(result.samples), f"{result.seconds:.1f}", "FAILED" if result.problems else "ok",
    ]  # fmt: skip


def show(cells: list[str]) -> None:
    print("  ".join(cell.rjust(max(len(name), 6)) for cell, name in zip(cells, COLUMNS, strict=True)), flush=True)


def plans(seeds: list[int], kills: int) -> list[Plan]:
    """The kills, spread over the seeds. Durability takes turns: as the product sets it, always, and power cuts."""
    share, extra = divmod(kills, len(seeds))
    ways = (("everysec", False), ("everysec", True), ("always", False))
    return [
        Plan(seed, share + (index < extra), fsync=ways[seed % 3][0], power=ways[seed % 3][1])
        for index, seed in enumerate(seeds)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs, over all seeds together")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further seed after this long")
    parser.add_argument("--keep", action="store_true", help="keep the folders of seeds that passed, too")
    parser.add_argument(
        "--partition", action="store_true", help="one seed, hosts in network namespaces, each cut off for a minute"
    )
    options = parser.parse_args()
    if options.partition and (code := partition.enter()) is not None:
        return code
    logging.getLogger("headrace").setLevel(logging.ERROR)  # the harness waits for the server it has just killed
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    zygote = Zygote(root / "zygote.log")
    network = partition.Network(root, ("generator", "learner")) if options.partition else None
    todo = plans(list(range(options.seed, options.seed + options.seeds)), options.kills)
    if network is not None:
        todo = [Plan(options.seed, 12, partitions=(60.0, 60.0))]
    results = []
    show(list(COLUMNS))
    try:
        for plan in todo:
            if time.monotonic() - started > options.seconds:
                break
            result = World(plan, root / str(plan.seed), zygote, network).run()
            results.append(result)
            show(row(result))
            if result.partitions:
                print(f"    cut off: {', '.join(result.partitions)}")
            for problem in result.problems:
                print(f"    {problem}")
            if result.problems:
                again = f"--seeds 1 --seed {plan.seed} --kills {plan.kills}"
                print(f"    reproduce: python -m tests.chaos {again}; its folder: {result.folder}")
            elif not options.keep:
                shutil.rmtree(result.folder)
    finally:
        zygote.close()
        if network is not None:
            network.close()
    failed = [result.plan.seed for result in results if result.problems]
    kills = sum(sum(result.kills.values()) for result in results)
    trained = sum(result.verdict.trained for result in results)
    ending = f"FAILED: seeds {failed}" if failed else "every invariant held"
    seconds = time.monotonic() - started
    print(f"{kills} kills, {len(results)} seeds, {trained} groups trained, {seconds:.0f} s: {ending}")
    if not failed and not options.keep:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
