"""The control messages of a weight update, as the learner announces them and the generators answer.

    learner                                   generator
    Form    come into group `epoch`     ->    Ack "formed": its workers are on their way
    Update  these parameters follow     ->    Ack "receiving"
            (broadcast)
    Commit  everybody has everything    ->    Ack "loaded": the next token is sampled by `version`; or "failed"; or
                                              "corrupt": what came is not what was sent, the old version stays
    {"type": "stop"}                          the run is over

`epoch` names a group and is never used again; a new Form supersedes everything before it. Messages are plain msgpack
maps; whoever reads one turns it into these classes first, which checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from common.errors import WireError
from common.lora import Adapter
from common.weightwire import Parameter, describe, parse

Stage = Literal["formed", "receiving", "loaded", "corrupt", "failed"]
STOP = {"type": "stop"}


@dataclass(frozen=True)
class Form:
    """`ranks`: generator id -> rank of its first worker; rank 0 is the sender."""

    epoch: int
    backend: str
    host: str
    port: int
    world_size: int
    ranks: dict[str, int]
    bucket_bytes: int
    timeout_s: float

    def message(self) -> dict[str, Any]:
        return {"type": "form", **asdict(self)}


@dataclass(frozen=True)
class Update:
    """`adapter`: the parameters are factors of LoRA, to be added to the base (`common.lora`); None: whole weights."""

    epoch: int
    version: int
    parameters: tuple[Parameter, ...]
    adapter: Adapter | None = None

    def message(self) -> dict[str, Any]:
        adapter = None if self.adapter is None else asdict(self.adapter)
        message = {"type": "update", "epoch": self.epoch, "version": self.version, "adapter": adapter}
        return {**message, **describe(self.parameters)}


@dataclass(frozen=True)
class Commit:
    """`checksum`: of what was sent (`common.checksum`); None where the backend does not let the receiver check."""

    epoch: int
    version: int
    checksum: int | None = None

    def message(self) -> dict[str, Any]:
        return {"type": "commit", **asdict(self)}


@dataclass(frozen=True)
class Stop:
    """The run is over: drain and leave."""


@dataclass(frozen=True)
class Ack:
    """`seconds`: for "loaded", the parts of the update as this generator measured them. `checksum`: for "loaded" and
    "corrupt", of what it received."""

    generator: str
    epoch: int
    version: int
    stage: Stage
    error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    checksum: int | None = None

    def message(self) -> dict[str, Any]:
        return asdict(self)


def read_control(message: Mapping[str, Any]) -> Form | Update | Commit | Stop | None:
    """The typed message; None for a type that is none of ours.

    Raises:
        WireError: a field is missing or is not what it should be.
    """
    kind = message.get("type")
    if kind == "stop":
        return Stop()
    if kind == "form":
        return Form(
            epoch=_get(message, "epoch", int),
            backend=_get(message, "backend", str),
            host=_get(message, "host", str),
            port=_get(message, "port", int),
            world_size=_get(message, "world_size", int),
            ranks=_get(message, "ranks", dict),
            bucket_bytes=_get(message, "bucket_bytes", int),
            timeout_s=float(_get(message, "timeout_s", (int, float))),
        )
    if kind == "update":
        parameters = parse(message.get("names"), message.get("dtypes"), message.get("shapes"))
        epoch, version = _get(message, "epoch", int), _get(message, "version", int)
        return Update(epoch, version, tuple(parameters), _adapter(message))
    if kind == "commit":
        return Commit(_get(message, "epoch", int), _get(message, "version", int), _checksum(message))
    return None


def read_ack(message: Mapping[str, Any]) -> Ack:
    """Raises WireError where the message is not an acknowledgement."""
    stage: Any = message.get("stage")
    if stage not in get_args(Stage):
        raise WireError(f"weights ack: stage is {stage!r:.80}; expected one of {', '.join(get_args(Stage))}")
    return Ack(
        generator=_get(message, "generator", str),
        epoch=_get(message, "epoch", int),
        version=_get(message, "version", int),
        stage=stage,
        error=str(message.get("error", "")),
        seconds={str(name): float(value) for name, value in dict(message.get("seconds") or {}).items()},
        checksum=_checksum(message),
    )


def _adapter(message: Mapping[str, Any]) -> Adapter | None:
    if message.get("adapter") is None:
        return None
    fields = _get(message, "adapter", dict)
    return Adapter(scale=float(_get(fields, "scale", (int, float))), base=_get(fields, "base", int))


def _checksum(message: Mapping[str, Any]) -> int | None:
    return None if message.get("checksum") is None else int(_get(message, "checksum", int))


def _get(message: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = message.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise WireError(f"weights message: field {name!r} is {value!r:.80}; expected {kind}")
    return value
