"""Messages between the rooms: msgpack, never pickle.

A message is a msgpack map with the schema version under `"v"` and its kind under `"t"`. An array is a map
`{"d": dtype, "s": length, "b": raw little-endian bytes}`. The responses of a group lie end to end, in one array for
each of their fields: a group is a hundred msgpack values, whatever its size. Everything is checked before it is
believed: lengths before anything is built, then kinds, dtypes and ranges. A message that does not fit raises
`WireError` with the id (where it could be read) and the reason. Reading one never takes more memory than its own length
and a few MB.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.trajectory import EvalAnswer, EvalAnswers, FinishReason, Group, Prompt, Response, VersionRun
from common.wireshape import check_shape

SCHEMA_VERSION = 2
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

_DTYPES = {code: np.dtype(f"<{code}") for code in ("i4", "i8", "f4", "f8", "u1")}
_LARGEST = 2**63 - 1  # what an int64 array of versions can hold
# Values a message may hold. Columns of a prompt are the user's; a broadcast names all parameters of a model.
_MOST_VALUES = {"group": 256, "prompt": 2**16}
_MOST_VALUES_OTHERWISE = 2**18
_FINISH: tuple[FinishReason, ...] = ("stop", "length")
_CORRECT = (False, True, None)


def pack(kind: str, body: Mapping[str, Any], arrays: Mapping[str, Sequence[NDArray[Any]]] | None = None) -> bytes:
    """Pack a message of plain values (and arrays from `pack_array`), and fields that are `arrays` laid end to end.

    Raises:
        WireError: an array that `pack_array` would refuse, or arrays of one field that differ in dtype.
    """
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    plain, chunked = {"v": SCHEMA_VERSION, "t": kind, **body}, arrays or {}
    packer.pack_map_header(len(plain) + len(chunked))
    for key, value in plain.items():
        packer.pack(key)
        packer.pack(value)
    parts: list[Any] = [packer.bytes()]
    for key, chunks in chunked.items():
        parts += _joined(key, chunks)
    return b"".join(parts)  # the one copy that is made of the arrays


def _joined(key: str, chunks: Sequence[NDArray[Any]]) -> list[Any]:
    """The field `key`, as parts of a message: what `pack_array` of the concatenated chunks would give."""
    codes = {_code(chunk) for chunk in chunks}
    if len(codes) != 1:
        raise WireError(f"{key}: arrays of dtypes {sorted(codes)}; expected some, of one dtype")
    code = codes.pop()
    dtype, length = _DTYPES[code], sum(len(chunk) for chunk in chunks)
    head = msgpack.packb(key) + b"\x83" + b"".join(msgpack.packb(each) for each in ("d", code, "s", length, "b"))
    size = b"\xc6" + (length * dtype.itemsize).to_bytes(4)
    return [head, size, *(np.ascontiguousarray(chunk, dtype=dtype) for chunk in chunks)]


def unpack(data: bytes, kind: str) -> dict[str, Any]:
    """Unpack a message and check its schema version and kind.

    Raises:
        WireError: not msgpack, too large, not a map, another schema version or another kind.
    """
    where = f"{kind} message"
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{where} of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    check_shape(data, _MOST_VALUES.get(kind, _MOST_VALUES_OTHERWISE), where)
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:  # msgpack's other errors are ValueErrors
        reason = error or type(error).__name__
        raise WireError(f"{where} of {len(data)} bytes is not msgpack: {reason}") from error
    if not isinstance(message, dict):
        raise WireError(f"{where} is a {type(message).__name__}; expected a map")
    version = message.get("v")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise WireError(f"{where} has schema version {version!r:.80}; this headrace reads {SCHEMA_VERSION}")
    if message.get("t") != kind:
        raise WireError(f"message is of kind {message.get('t')!r:.80}; expected {kind!r}")
    return message


def _code(array: NDArray[Any]) -> str:
    code = f"{array.dtype.kind}{array.dtype.itemsize}"
    if code not in _DTYPES or array.ndim != 1:
        raise WireError(
            f"array of dtype {array.dtype}, shape {array.shape}; expected int32, int64, float32, float64 or uint8, one "
            "dimension"
        )
    return code


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """A one-dimensional int32, int64, float32, float64 or uint8 array as a wire map.

    Raises:
        WireError: another dtype or shape; nothing is converted in silence.
    """
    code = _code(array)
    return {"d": code, "s": len(array), "b": array.astype(_DTYPES[code], copy=False).tobytes()}


def unpack_array(value: Any, code: str, where: str, length: int | None = None) -> NDArray[Any]:
    """The array in a wire map, of dtype `code` ("i4" and so on), and of `length` where it is given; read-only, since it
    shares the message's bytes."""
    if not isinstance(value, dict) or value.keys() != {"d", "s", "b"}:
        raise WireError(f"{where}: expected an array map with d, s and b")
    if value["d"] != code:
        raise WireError(f"{where}: dtype is {value['d']!r:.80}; expected {code!r}")
    said, raw = value["s"], value["b"]
    if type(said) is not int or said < 0 or not isinstance(raw, bytes):
        kind = type(raw).__name__
        raise WireError(f"{where}: length {said!r:.80} with {kind} data; expected bytes and a length >= 0")
    if len(raw) != said * _DTYPES[code].itemsize:
        raise WireError(f"{where}: {len(raw)} bytes for {said} values of {_DTYPES[code].itemsize} bytes each")
    if length is not None and said != length:
        raise WireError(f"{where}: {said} values; expected {length}")
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


def encode_group(group: Group) -> bytes:
    """Raises WireError where an array has another dtype or shape than `common.trajectory` says."""
    responses = group.responses
    runs = [run for response in responses for run in response.versions]
    body = {
        "id": group.group_id,
        "prompt": pack_array(group.prompt_ids),
        "size": len(responses),
        "generator": group.generator,
        "temperature": group.temperature,
        "sampled_at": group.sampled_at,
        "version": group.released_version,
        "lengths": pack_array(np.array([len(each.token_ids) for each in responses], dtype=np.int32)),
        "runs": pack_array(np.array([len(each.versions) for each in responses], dtype=np.int32)),
        "run_versions": pack_array(np.array([run.version for run in runs], dtype=np.int64)),
        "run_starts": pack_array(np.array([run.start for run in runs], dtype=np.int32)),
        "finish": pack_array(np.array([_FINISH.index(each.finish_reason) for each in responses], dtype=np.uint8)),
        "raw_rewards": pack_array(np.array([each.raw_reward for each in responses], dtype=np.float64)),
        "rewards": pack_array(np.array([each.reward for each in responses], dtype=np.float64)),
        "correct": pack_array(np.array([_CORRECT.index(each.correct) for each in responses], dtype=np.uint8)),
    }
    tokens, logprobs = [each.token_ids for each in responses], [each.logprobs for each in responses]
    return pack("group", body, {"tokens": tokens, "logprobs": logprobs})


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
    if size == 0 or (group_size is not None and size != group_size):
        raise WireError(f"{where}: {size} responses; expected {group_size or 'at least 1'}")
    return Group(
        group_id=group_id,
        prompt_ids=prompt_ids,
        responses=_unpack_responses(message, size, where),
        generator=_field(message, "generator", str, where),
        temperature=_number(message, "temperature", where),
        sampled_at=_number(message, "sampled_at", where),
        released_version=_count(message, "version", where),
    )


def _unpack_responses(message: Mapping[str, Any], size: int, where: str) -> tuple[Response, ...]:
    def array(name: str, code: str, length: int) -> NDArray[Any]:
        return unpack_array(message.get(name), code, f"{where}: {name}", length)

    # Short ones are checked as lists: for a few values that is several times faster than a call into numpy.
    ends = _ends(array("lengths", "i4", size).tolist(), f"{where}: lengths")
    tokens, logprobs = array("tokens", "i4", ends[-1]), array("logprobs", "f4", ends[-1])
    if int(tokens.min()) < 0:
        _refuse("token id", tokens, tokens < 0, ends, ">= 0", where)
    if not np.isfinite(logprobs).all():
        _refuse("logprob", logprobs, ~np.isfinite(logprobs), ends, "a finite number", where)
    runs = _unpack_runs(message, ends, where)
    raw_rewards, rewards = array("raw_rewards", "f8", size).tolist(), array("rewards", "f8", size).tolist()
    finish, correct = array("finish", "u1", size).tolist(), array("correct", "u1", size).tolist()
    responses = []
    begin = 0
    for i, end in enumerate(ends):
        if not (math.isfinite(raw_rewards[i]) and math.isfinite(rewards[i])):
            raise WireError(f"{where}: response {i}: rewards {raw_rewards[i]}, {rewards[i]}; expected finite numbers")
        if finish[i] >= len(_FINISH) or correct[i] >= len(_CORRECT):
            raise WireError(
                f"{where}: response {i}: finish {finish[i]}, correct {correct[i]}; expected 0 (stop) or 1 (length), "
                "and 0 (no), 1 (yes) or 2 (unknown)"
            )
        finish_reason, judged = _FINISH[finish[i]], _CORRECT[correct[i]]
        response = Response(
            tokens[begin:end], logprobs[begin:end], runs[i], finish_reason, raw_rewards[i], rewards[i], judged
        )
        responses.append(response)
        begin = end
    return tuple(responses)


def _ends(lengths: list[int], where: str) -> list[int]:
    """Where each of the parts of these lengths ends that lie end to end. None is empty."""
    if min(lengths) < 1:
        raise WireError(f"{where}: response {lengths.index(min(lengths))} has {min(lengths)}; expected at least 1")
    return list(itertools.accumulate(lengths))


def _refuse(
    name: str, values: NDArray[Any], bad: NDArray[np.bool_], ends: Sequence[int], expected: str, where: str
) -> None:
    """Raise for the first bad value, naming the response whose part, ending at `ends[response]`, it lies in."""
    index = int(bad.argmax())
    response = bisect.bisect_right(ends, index)
    raise WireError(f"{where}: response {response}: {name} {values[index]}; expected {expected}")


def _unpack_runs(message: Mapping[str, Any], ends: Sequence[int], where: str) -> list[tuple[VersionRun, ...]]:
    """The version runs of every response, which ends before token `ends[response]` of the group."""
    counts = unpack_array(message.get("runs"), "i4", f"{where}: runs", len(ends)).tolist()
    run_ends = _ends(counts, f"{where}: runs")
    versions = unpack_array(message.get("run_versions"), "i8", f"{where}: run_versions", run_ends[-1]).tolist()
    starts = unpack_array(message.get("run_starts"), "i4", f"{where}: run_starts", run_ends[-1]).tolist()
    pairs = list(zip(versions, starts, strict=True))
    made = {pair: VersionRun(*pair) for pair in set(pairs)}  # responses of a group mostly share them
    of_response, begin, first = [], 0, 0
    for response, (end, last) in enumerate(zip(ends, run_ends, strict=True)):
        runs = pairs[first:last]
        _check_runs(runs, end - begin, where, response)
        of_response.append(tuple([made[pair] for pair in runs]))
        begin, first = end, last
    return of_response


def _check_runs(runs: list[tuple[int, int]], tokens: int, where: str, response: int) -> None:
    """Runs (version, start) start at token 0, begin one after the other, and end within the response. Versions may
    fall: a learner that resumed from an older checkpoint publishes older weights."""
    before_version, before_start = -1, -1
    for version, start in runs:
        late = start <= before_start if before_start >= 0 else start != 0
        if version < 0 or version == before_version or late or start >= tokens:
            raise WireError(
                f"{where}: response {response}: version run {[version, start]}; expected a version >= 0 other than the "
                f"one before, at token 0 first, then later each time and before token {tokens}"
            )
        before_version, before_start = version, start


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
