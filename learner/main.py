"""What torchrun starts on every rank; `headrace learner` is the command for people."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common import log as logs
from common import settings
from common.errors import HeadraceError


def main() -> int:
    parser = argparse.ArgumentParser(prog="learner.main")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    config = settings.load(arguments.config, arguments.overrides)
    log = logs.setup(config.run.run_id, f"learner-{os.environ['RANK']}")
    from learner.loop import Learner

    try:
        Learner(config, log, resume=arguments.resume).run()
    except HeadraceError as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
