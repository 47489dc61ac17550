"""`python node_driver.py CONFIG NAME FOLDER`: a node of the learner whose ranks compute nothing.

A rank counts in step with the others and leaves with them when one of them is told to, until FOLDER/done exists. It
writes `NAME rank/world` into FOLDER/rounds when it begins, and FOLDER/worlds/<world> says by its modification time
when a world of that size last counted. FOLDER/broken makes it fail for good, FOLDER/unsaved when it leaves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from common import settings

HERE = Path(__file__)


def rank(name: str, folder: Path) -> int:
    import torch
    import torch.distributed as dist

    from learner.main import LEAVING, PERMANENT

    dist.init_process_group("gloo")
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    world = dist.get_world_size()
    with (folder / "rounds").open("a") as file:
        file.write(f"{name} {dist.get_rank()}/{world}\n")
    while True:
        flags = torch.tensor([leaving.is_set(), (folder / "done").exists(), (folder / "broken").exists()])
        flags = flags.int()
        dist.all_reduce(flags)
        (folder / "worlds" / str(world)).touch()
        for flag, code in zip(flags.tolist(), (LEAVING, 0, PERMANENT), strict=True):
            if flag:
                dist.barrier()
                return 1 if code == LEAVING and (folder / "unsaved").exists() else code
        threading.Event().wait(0.02)


def main() -> int:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as `learner.cli` does
    if sys.argv[1] == "rank":
        return rank(sys.argv[2], Path(sys.argv[3]))
    from learner.node import Node

    config, name, folder = sys.argv[1:]
    return Node(settings.load(Path(config)), ["-u", str(HERE), "rank", name, folder]).run()


if __name__ == "__main__":
    sys.exit(main())
