"""Messages between the rooms: msgpack, never pickle.

A message is a msgpack map with the schema version under `"v"` and its kind under `"t"`. An array is a map
`{"d": dtype, "s": length, "b": raw little-endian bytes}`. Everything is checked before it is believed: kinds, dtypes,
lengths, ranges; a message that does not fit raises `WireError` with the id (where it could be read) and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.trajectory import (
    NOTHING_YET,
    EvalAnswer,
    EvalAnswers,
    Group,
    PartialGroup,
    PartialResponse,
    Prompt,
    Response,
    VersionRun,
)

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

_DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4")}
_LARGEST = 2**63 - 1  # what an int64 array of versions can hold


def pack(kind: str, body: Mapping[str, Any]) -> bytes:
    """Pack a message of plain values (and arrays from `pack_array`)."""
    return msgpack.packb({"v": SCHEMA_VERSION, "t": kind, **body}, use_bin_type=True)


def unpack(data: bytes, kind: str) -> dict[str, Any]:
    """Unpack a message and check its schema version and kind.

    Raises:
        WireError: not msgpack, not a map, another schema version or another kind.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{kind} message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:  # msgpack's other errors are ValueErrors
        reason = error or type(error).__name__
        raise WireError(f"{kind} message of {len(data)} bytes is not msgpack: {reason}") from error
    if not isinstance(message, dict):
        raise WireError(f"{kind} message is a {type(message).__name__}; expected a map")
    version = message.get("v")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise WireError(f"{kind} message has schema version {version!r}; this headrace reads {SCHEMA_VERSION}")
    if message.get("t") != kind:
        raise WireError(f"message is of kind {message.get('t')!r}; expected {kind!r}")
    return message


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """A one-dimensional int32 or float32 array as a wire map.

    Raises:
        WireError: another dtype or shape; nothing is converted in silence.
    """
    code = f"{array.dtype.kind}{array.dtype.itemsize}"
    if code not in _DTYPES or array.ndim != 1:
        raise WireError(f"array of dtype {array.dtype}, shape {array.shape}; expected int32 or float32, one dimension")
    return {"d": code, "s": len(array), "b": array.astype(_DTYPES[code], copy=False).tobytes()}


def unpack_array(value: Any, code: str, where: str) -> NDArray[Any]:
    """The array in a wire map, of dtype `code` ("i4" or "f4"); read-only, since it shares the message's bytes."""
    if not isinstance(value, dict) or value.keys() != {"d", "s", "b"}:
        raise WireError(f"{where}: expected an array map with d, s and b")
    if value["d"] != code:
        raise WireError(f"{where}: dtype is {value['d']!r}; expected {code!r}")
    length, raw = value["s"], value["b"]
    if type(length) is not int or length < 0 or not isinstance(raw, bytes):
        raise WireError(f"{where}: length {length!r} with {type(raw).__name__} data; expected bytes and a length >= 0")
    if len(raw) != length * _DTYPES[code].itemsize:
        raise WireError(f"{where}: {len(raw)} bytes for {length} values of {_DTYPES[code].itemsize} bytes each")
    return np.frombuffer(raw, dtype=_DTYPES[code])


def _field(message: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = message.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"{where}: field {name!r} is {value!r:.80}; expected {kind}")
    return value


def _count(message: Mapping[str, Any], name: str, where: str) -> int:
    value: int = _field(message, name, int, where)
    if not 0 <= value <= _LARGEST:
        raise WireError(f"{where}: field {name!r} is {value}; expected 0 to {_LARGEST}")
    return value


def _number(message: Mapping[str, Any], name: str, where: str) -> float:
    value = float(_field(message, name, (int, float), where))
    if not math.isfinite(value):
        raise WireError(f"{where}: field {name!r} is {value}; expected a finite number")
    return value


def _identity(message: Mapping[str, Any], kind: str) -> str:
    group_id: str = _field(message, "id", str, kind)
    if not group_id:
        raise WireError(f"{kind}: empty group id")
    return group_id


def _token_ids(value: Any, where: str) -> NDArray[Any]:
    token_ids = unpack_array(value, "i4", f"{where}: ids")
    if len(token_ids) == 0:
        raise WireError(f"{where}: is empty; expected at least one token")
    if int(token_ids.min()) < 0:
        raise WireError(f"{where}: token id {int(token_ids.min())}; expected >= 0")
    return token_ids


def encode_prompt(prompt: Prompt) -> bytes:
    return pack(
        "prompt",
        {
            "id": prompt.group_id,
            "ids": pack_array(prompt.token_ids),
            "text": prompt.text,
            "columns": prompt.columns,
            "attempt": prompt.attempt,
            "version": prompt.released_version,
        },
    )


def decode_prompt(data: bytes) -> Prompt:
    """Raises WireError where the message is not a prompt, or the prompt is empty."""
    message = unpack(data, "prompt")
    group_id = _identity(message, "prompt")
    where = f"prompt {group_id}"
    token_ids = _token_ids(message.get("ids"), f"{where}: prompt")
    return Prompt(
        group_id=group_id,
        token_ids=token_ids,
        text=_field(message, "text", str, where),
        columns=_field(message, "columns", dict, where),
        attempt=_count(message, "attempt", where),
        released_version=_count(message, "version", where),
    )


def _pack_response(response: Response) -> dict[str, Any]:
    return {
        "ids": pack_array(response.token_ids),
        "logprobs": pack_array(response.logprobs),
        "versions": [[run.version, run.start] for run in response.versions],
        "finish": response.finish_reason,
        "raw_reward": response.raw_reward,
        "reward": response.reward,
        "correct": response.correct,
    }


def encode_group(group: Group) -> bytes:
    return pack(
        "group",
        {
            "id": group.group_id,
            "prompt": pack_array(group.prompt_ids),
            "size": len(group.responses),
            "responses": [_pack_response(response) for response in group.responses],
            "generator": group.generator,
            "temperature": group.temperature,
            "sampled_at": group.sampled_at,
            "version": group.released_version,
        },
    )


def decode_group(data: bytes, group_size: int | None = None) -> Group:
    """The group in a message. `group_size`: how many responses it must hold (None: as many as it says).

    Raises:
        WireError: anything in it is not as promised; the text starts with the group's id.
    """
    message = unpack(data, "group")
    group_id = _identity(message, "group")
    where = f"group {group_id}"
    prompt_ids = _token_ids(message.get("prompt"), f"{where}: prompt")
    size = _count(message, "size", where)
    responses = _field(message, "responses", list, where)
    expected = size if group_size is None else group_size
    if len(responses) != expected or size != expected or expected == 0:
        raise WireError(f"{where}: {len(responses)} responses, said to be {size}; expected {expected}, at least 1")
    return Group(
        group_id=group_id,
        prompt_ids=prompt_ids,
        responses=tuple(_unpack_response(r, f"{where}: response {i}") for i, r in enumerate(responses)),
        generator=_field(message, "generator", str, where),
        temperature=_number(message, "temperature", where),
        sampled_at=_number(message, "sampled_at", where),
        released_version=_count(message, "version", where),
    )


def _unpack_response(value: Any, where: str) -> Response:
    if not isinstance(value, dict):
        raise WireError(f"{where}: is a {type(value).__name__}; expected a map")
    token_ids, logprobs = _sampled_tokens(value, where)
    finish = value.get("finish")
    if finish not in ("stop", "length"):
        raise WireError(f"{where}: finish reason {finish!r}; expected 'stop' or 'length'")
    correct = value.get("correct")
    if correct is not None and not isinstance(correct, bool):
        raise WireError(f"{where}: correct is {correct!r}; expected true, false or null")
    return Response(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=_unpack_versions(value.get("versions"), len(token_ids), where),
        finish_reason=finish,
        raw_reward=_number(value, "raw_reward", where),
        reward=_number(value, "reward", where),
        correct=correct,
    )


def _sampled_tokens(value: Mapping[str, Any], where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Token ids and finite log-probabilities, as many, at least one."""
    token_ids = _token_ids(value.get("ids"), where)
    logprobs = unpack_array(value.get("logprobs"), "f4", f"{where}: logprobs")
    if len(logprobs) != len(token_ids):
        raise WireError(f"{where}: {len(token_ids)} tokens and {len(logprobs)} logprobs; expected as many")
    if not np.isfinite(logprobs).all():
        raise WireError(f"{where}: a logprob is not finite")
    return token_ids, logprobs


def _unpack_versions(value: Any, tokens: int, where: str) -> tuple[VersionRun, ...]:
    """Runs start at token 0, begin one after the other, and end within the response. Versions may fall: a learner that
    resumed from an older checkpoint publishes older weights."""
    runs: list[VersionRun] = []
    for item in value if isinstance(value, list) else []:
        if not (isinstance(item, list) and len(item) == 2 and all(type(x) is int and 0 <= x <= _LARGEST for x in item)):
            raise WireError(f"{where}: version run {item!r:.80}; expected [version, start]")
        run = VersionRun(version=item[0], start=item[1])
        if run.start >= tokens or (runs and (run.start <= runs[-1].start or run.version == runs[-1].version)):
            raise WireError(f"{where}: version run {item} out of order or beyond {tokens} tokens")
        runs.append(run)
    if not runs or runs[0].start != 0:
        raise WireError(f"{where}: version runs {value!r:.80} do not start at token 0")
    return tuple(runs)


def encode_partial(partial: PartialGroup) -> bytes:
    return pack(
        "partial",
        {
            "id": partial.group_id,
            "temperature": partial.temperature,
            "responses": [_pack_partial(response) for response in partial.responses],
        },
    )


def _pack_partial(response: PartialResponse) -> dict[str, Any] | None:
    if len(response.token_ids) == 0:
        return None
    return {
        "ids": pack_array(response.token_ids),
        "logprobs": pack_array(response.logprobs),
        "versions": [[run.version, run.start] for run in response.versions],
        "finish": response.finish_reason,
    }


def decode_partial(data: bytes, group_id: str, group_size: int) -> PartialGroup:
    """What was sampled of the group `group_id`, whose prompt asks for `group_size` responses.

    Raises:
        WireError: it is of another group or of another size, or anything in it is not as promised.
    """
    message = unpack(data, "partial")
    if (found := _identity(message, "partial")) != group_id:
        raise WireError(f"partial {found}: came with the prompt {group_id}")
    where = f"partial {group_id}"
    responses = _field(message, "responses", list, where)
    if len(responses) != group_size:
        raise WireError(f"{where}: {len(responses)} responses; expected {group_size}")
    return PartialGroup(
        group_id=group_id,
        responses=tuple(_unpack_partial(r, f"{where}: response {i}") for i, r in enumerate(responses)),
        temperature=_number(message, "temperature", where),
    )


def _unpack_partial(value: Any, where: str) -> PartialResponse:
    if value is None:
        return NOTHING_YET
    if not isinstance(value, dict):
        raise WireError(f"{where}: is a {type(value).__name__}; expected a map or null")
    token_ids, logprobs = _sampled_tokens(value, where)
    finish = value.get("finish")
    if finish not in (None, "stop", "length"):
        raise WireError(f"{where}: finish reason {finish!r}; expected 'stop', 'length' or null")
    versions = _unpack_versions(value.get("versions"), len(token_ids), where)
    return PartialResponse(token_ids, logprobs, versions, finish)


def encode_answers(answers: EvalAnswers) -> bytes:
    packed = [
        {
            "tokens": answer.tokens,
            "truncated": answer.truncated,
            "reward": answer.reward,
            "correct": answer.correct,
            "versions": [answer.oldest_version, answer.newest_version],
        }
        for answer in answers.answers
    ]
    return pack("answers", {"version": answers.version, "index": answers.index, "answers": packed})


def decode_answers(data: bytes) -> EvalAnswers:
    """Raises WireError where the message is not answers to an evaluation prompt."""
    message = unpack(data, "answers")
    index = _count(message, "index", "answers")
    where = f"answers {index}"
    answers = _field(message, "answers", list, where)
    return EvalAnswers(
        version=_count(message, "version", where),
        index=index,
        answers=tuple(_unpack_answer(answer, f"{where}: answer {i}") for i, answer in enumerate(answers)),
    )


def _unpack_answer(value: Any, where: str) -> EvalAnswer:
    if not isinstance(value, dict):
        raise WireError(f"{where}: is a {type(value).__name__}; expected a map")
    versions = value.get("versions")
    if not (isinstance(versions, list) and len(versions) == 2 and all(type(x) is int for x in versions)):
        raise WireError(f"{where}: versions are {versions!r:.80}; expected [oldest, newest]")
    if not 0 <= versions[0] <= versions[1] <= _LARGEST:
        raise WireError(f"{where}: versions are {versions}; expected 0 <= oldest <= newest")
    return EvalAnswer(
        tokens=_count(value, "tokens", where),
        truncated=_field(value, "truncated", bool, where),
        reward=None if value.get("reward") is None else _number(value, "reward", where),
        correct=None if value.get("correct") is None else _field(value, "correct", bool, where),
        oldest_version=versions[0],
        newest_version=versions[1],
    )
