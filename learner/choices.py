"""What of the learner's computation is a choice of the configuration: what there is here, what was taken and why.

Said once at the start, by `headrace doctor` too. An explicit choice that this machine cannot make is refused.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

from common.config import Config
from common.errors import ConfigError

_COMPILERS = ("g++", "clang++")


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on CPUs."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def check(config: Config) -> None:
    """Raises ConfigError where something is chosen that is not here."""
    if config.learner.compile == "layers" and not _could_compile():
        raise ConfigError(
            f"learner.compile: 'layers' needs a C++ compiler on CPUs, and there is none of "
            f"{', '.join(_COMPILERS)}; install one, or use 'off'"
        )


def chosen(config: Config) -> str:
    """One line."""
    return ", ".join(_parts(config))


def _parts(config: Config) -> Iterator[str]:
    import torch

    learner = config.learner
    blocks = learner.attention != "sdpa"
    yield "attention=" + ("blocks" if blocks else "sdpa") + (
        " (auto: a group at a time, prompts once)" if learner.attention == "auto" else " (as configured)"
    )
    if learner.sequence_parallel > 1:
        yield f"rows shared by {learner.sequence_parallel} ranks"
    possible = "possible here" if _could_compile() else f"no {' or '.join(_COMPILERS)} here"
    yield f"compile={learner.compile}" + ("" if learner.compile != "off" else f" ({possible})")
    liger = "not used" if importlib.util.find_spec("liger_kernel") else "not installed"
    yield f"head=chunked (liger {liger})"
    yield f"dtype={learner.dtype}"
    yield f"device={torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu'}"


def _could_compile() -> bool:
    import torch

    return torch.cuda.is_available() or compiler() is not None
