"""Logging for operators: one line per event that matters, with time, run, component and policy version.

Libraries that chatter (vLLM, DeepSpeed, torch) write to the same process's log file, not to the console.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_FORMAT = "%(asctime)s %(levelname).1s run=%(run)s %(component)s v=%(version)s %(message)s"


class Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that knows its run and component; set `version` when the policy version changes."""

    def __init__(self, run: str, component: str) -> None:
        super().__init__(logging.getLogger(f"headrace.{component}"), {})
        self.run, self.component, self.version = run, component, "-"

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs["extra"] = {"run": self.run, "component": self.component, "version": self.version}
        return msg, kwargs


def setup(run: str, component: str, level: int = logging.INFO) -> Logger:
    """Send this process's headrace lines to standard error and return its logger."""
    root = logging.getLogger("headrace")
    root.setLevel(level)
    root.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    # The defaults are for rooms that log without a Logger of their own.
    defaults = {"run": run, "component": component, "version": "-"}
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S", defaults=defaults))
    root.handlers[:] = [handler]
    return Logger(run, component)
