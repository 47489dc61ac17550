"""What torchrun's agent starts on every rank; `headrace learner` is the command for people."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from common import environment, settings
from common import log as logs
from common.config import Config
from common.errors import ConfigError, HeadraceError

# Exit codes: something is wrong that starting again cannot put right; and, of an elastic learner, this round is over
# but the run is not.
PERMANENT, LEAVING = 2, 75


def main() -> int:
    parser = argparse.ArgumentParser(prog="learner.main")
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    config = settings.load(arguments.config, arguments.overrides)
    log = logs.setup(config.run.run_id, f"learner-{os.environ['RANK']}")
    from learner.loop import Learner
    from learner.startup import import_all

    import_all()  # here, so that nobody waits for it in the group
    if os.environ["RANK"] == "0":
        _record(config, arguments.config, log)
    elastic = config.learner.elastic is not None
    try:
        complete = Learner(config, log, resume=arguments.resume or elastic).run()
    except HeadraceError as error:
        log.error("%s", error)
        return PERMANENT if isinstance(error, ConfigError) or not elastic else 1
    except RuntimeError as error:
        if "gloo" not in str(error):  # it has no error of its own for this
            raise
        log.error("another rank has gone: %s", str(error).splitlines()[0])
        return 1
    return LEAVING if elastic and not complete else 0


def _record(config: Config, given: Path, log: logs.Logger) -> None:
    """Write down what this learner runs with. `headrace up` has written the configuration, and gives us that file."""
    import torch

    folder = config.run.folder
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        if given.resolve() != (folder / environment.CONFIG).resolve():
            environment.record_config(config)
        environment.record(folder, gpus)
    except OSError as error:
        log.warning("%s: what this run runs with is not written down: %s", folder, error.strerror)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart costs seconds, and may wait for ranks that have gone
