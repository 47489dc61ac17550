"""Messages survive the wire bit for bit; one whose fields do not fit is refused, naming the field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_messages import a_group, a_prompt, packed, runs

from common.errors import WireError
from common.trajectory import EvalAnswer, EvalAnswers, Group, Prompt, Response, VersionRun
from common.wire import (
    SCHEMA_VERSION,
    decode_answers,
    decode_group,
    decode_prompt,
    encode_answers,
    encode_group,
    encode_prompt,
    pack,
    pack_array,
    unpack,
    unpack_array,
)

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
finite32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
counts = st.integers(0, INT64_MAX)
integers = st.integers(-(2**63), 2**64 - 1)
columns = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | integers | finite | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def tokens(length: int | None = None) -> st.SearchStrategy[Any]:
    low, high = (1, 30) if length is None else (length, length)
    return st.lists(st.integers(0, INT32_MAX), min_size=low, max_size=high).map(lambda x: np.array(x, dtype=np.int32))


@st.composite
def responses(draw: st.DrawFn) -> Response:
    length = draw(st.integers(1, 30))
    starts = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=4))})
    versions = draw(st.lists(counts, min_size=len(starts), max_size=len(starts), unique=True))  # they may fall
    return Response(
        token_ids=draw(tokens(length)),
        logprobs=np.array(draw(st.lists(finite32, min_size=length, max_size=length)), dtype=np.float32),
        versions=tuple(VersionRun(version, start) for version, start in zip(versions, starts, strict=True)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        raw_reward=draw(finite),
        reward=draw(finite),
        correct=draw(st.none() | st.booleans()),
    )


prompts = st.builds(
    Prompt,
    group_id=ids,
    token_ids=tokens(),
    text=st.text(max_size=20),
    columns=columns,
    attempt=counts,
    released_version=counts,
)
groups = st.builds(
    Group,
    group_id=ids,
    prompt_ids=tokens(),
    responses=st.lists(responses(), min_size=1, max_size=4).map(tuple),
    generator=st.text(max_size=10),
    temperature=finite,
    sampled_at=finite,
    released_version=counts,
)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into dataclasses and compares arrays by dtype and bits."""
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@given(prompts)
def test_prompt_round_trip_is_exact(prompt: Prompt) -> None:
    assert same(decode_prompt(encode_prompt(prompt)), prompt)


@given(groups)
def test_group_round_trip_is_exact(group: Group) -> None:
    data = encode_group(group)
    assert same(decode_group(data), group)
    assert same(decode_group(data, len(group.responses)), group)


@given(groups)
def test_decoded_group_has_a_version_for_every_token(group: Group) -> None:
    for response in decode_group(encode_group(group)).responses:
        versions = response.token_versions()
        assert len(versions) == len(response.token_ids)
        assert versions.min() >= group.oldest_version
        assert set(versions.tolist()) == {run.version for run in response.versions}


def test_versions_that_fall_within_a_response_accepted_and_told_per_token() -> None:
    """A learner that resumed from an older checkpoint publishes older weights while a response is in flight."""
    group = decode_group(a_group(**runs([[7, 0], [8, 1], [5, 2]], [[3, 0], [4, 2]])))
    assert [[run.version, run.start] for run in group.responses[0].versions] == [[7, 0], [8, 1], [5, 2]]
    assert group.responses[0].token_versions().tolist() == [7, 8, 5]
    assert group.oldest_version == 3
    assert decode_group(a_group(**runs(*[[[7, 0], [8, 1], [5, 2]]] * 2))).oldest_version == 5
    assert same(decode_group(encode_group(group)), group)


@pytest.mark.parametrize("version", [None, 0, SCHEMA_VERSION + 1, "1"])
def test_unpack_other_schema_version_refused_with_both(version: Any) -> None:
    with pytest.raises(WireError, match=f"reads {SCHEMA_VERSION}"):
        unpack(msgpack.packb({"v": version, "t": "prompt"}), "prompt")


def test_unpack_other_kind_refused() -> None:
    with pytest.raises(WireError, match="kind 'prompt'"):
        decode_group(a_prompt())


INTS = np.array([1, 2, 3], dtype=np.int32)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2, 3],
        {"d": "i4", "s": 3},
        {**pack_array(INTS), "extra": 1},
        {**pack_array(INTS), "d": "f4"},
        {**pack_array(INTS), "d": "O"},
        {**pack_array(INTS), "s": 4},
        {**pack_array(INTS), "s": 2**62},
        {**pack_array(INTS), "s": -1},
        {**pack_array(INTS), "s": True},
        {**pack_array(INTS), "b": "text"},
        {**pack_array(INTS), "b": b"\x00" * 11},
    ],
)
def test_unpack_array_with_wrong_header_refused(value: Any) -> None:
    with pytest.raises(WireError, match="here"):
        unpack_array(value, "i4", "here")


def test_pack_array_is_little_endian_whatever_the_input() -> None:
    big = np.array([1, 258], dtype=">i4")
    assert pack_array(big)["b"] == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert np.array_equal(unpack_array(pack_array(big[::-1]), "i4", "here"), [258, 1])


@pytest.mark.parametrize("array", [np.zeros(2, np.int16), np.zeros(2, np.uint32), np.zeros((1, 2), np.int32)])
def test_pack_array_of_another_dtype_or_shape_refused(array: np.ndarray) -> None:
    with pytest.raises(WireError, match=r"expected int32.* one dimension"):
        pack_array(array)


def test_unpack_array_result_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        unpack_array(pack_array(INTS), "i4", "here")[0] = 9


NO_INTS = pack_array(np.array([], dtype=np.int32))


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"id": 7},
        {"ids": NO_INTS},
        {"ids": pack_array(np.array([-1], dtype=np.int32))},
        {"ids": pack_array(np.array([1.0], dtype=np.float32))},
        {"text": b"bytes"},
        {"columns": []},
        {"attempt": -1},
        {"attempt": True},
        {"version": None},
    ],
)
def test_decode_prompt_with_one_bad_field_refused(changes: dict[str, Any]) -> None:
    decode_prompt(a_prompt())
    with pytest.raises(WireError):
        decode_prompt(a_prompt(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": NO_INTS}, "prompt: is empty"),
        ({"prompt": packed(np.int32, -1)}, "prompt: token id -1"),
        ({"size": 3}, "lengths: 2 values; expected 3"),
        ({"size": 0}, "0 responses"),
        ({"size": 2**40}, "lengths: 2 values"),
        ({"lengths": "text"}, "lengths: expected an array"),
        ({"lengths": packed(np.int32, 6)}, "lengths: 1 values; expected 2"),
        ({"lengths": packed(np.int32, 6, 0)}, "lengths: response 1 has 0"),
        ({"lengths": packed(np.int32, 7, -1)}, "lengths: response 1 has -1"),
        ({"lengths": packed(np.int32, 2**31 - 1, 2**31 - 1)}, "tokens: 6 values; expected 4294967294"),
        ({"tokens": packed(np.int64, 5, 6, 7, 5, 6, 7)}, "tokens: dtype is 'i8'; expected 'i4'"),
        ({"tokens": packed(np.int32, 5, 6, 7, 5, 6)}, "tokens: 5 values; expected 6"),
        ({"tokens": packed(np.int32, 5, 6, 7, 5, -6, 7)}, "response 1: token id -6"),
        ({"logprobs": packed(np.float64, 0, 0, 0, 0, 0, 0)}, "logprobs: dtype is 'f8'; expected 'f4'"),
        ({"logprobs": packed(np.float32, 0, 0, 0, 0, 0)}, "logprobs: 5 values; expected 6"),
        ({"logprobs": packed(np.float32, 0, 0, 0, np.nan, 0, 0)}, "response 1: logprob nan"),
        ({"logprobs": packed(np.float32, 0, 0, -np.inf, 0, 0, 0)}, "response 0: logprob -inf"),
        ({"finish": packed(np.uint8, 0, 2)}, "response 1: finish 2"),
        ({"finish": packed(np.uint8, 0)}, "finish: 1 values; expected 2"),
        ({"correct": packed(np.uint8, 1, 3)}, "response 1: finish 1, correct 3"),
        ({"raw_rewards": packed(np.float64, 1, np.nan)}, "response 1: rewards nan"),
        ({"rewards": packed(np.float64, 1, np.inf)}, "response 1: rewards 0.0, inf"),
        ({"rewards": None}, "rewards: expected an array"),
        ({"generator": None}, "generator"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"sampled_at": float("inf")}, "sampled_at"),
        ({"version": -1}, "version"),
        ({"version": 1.5}, "version"),
        (runs([[3, 0]], []), "runs: response 1 has 0"),
        (runs([[3, 0]]), "runs: 1 values; expected 2"),
        (runs([[3, 0]], [[3, 1]]), r"response 1: version run \[3, 1\]"),
        (runs([[3, 0]], [[3, 0], [4, 3]]), r"response 1: version run \[4, 3\]"),
        (runs([[3, 0]], [[3, 0], [4, 0]]), r"response 1: version run \[4, 0\]"),
        (runs([[3, 0]], [[3, 0], [4, 2], [5, 1]]), r"response 1: version run \[5, 1\]"),
        (runs([[3, 0]], [[3, 0], [3, 2]]), r"response 1: version run \[3, 2\]"),
        (runs([[3, 0]], [[-1, 0]]), r"response 1: version run \[-1, 0\]"),
        (runs([[3, 0]], [[3, -1]]), r"response 1: version run \[3, -1\]"),
    ],
)
def test_decode_group_with_one_bad_field_refused_with_its_id_and_why(changes: dict[str, Any], reason: str) -> None:
    decode_group(a_group())
    with pytest.raises(WireError, match=rf"^group 000000007.*{reason}"):
        decode_group(a_group(**changes))


def test_decode_group_of_another_size_than_configured_refused() -> None:
    assert len(decode_group(a_group(), 2).responses) == 2
    with pytest.raises(WireError, match="2 responses; expected 8"):
        decode_group(a_group(), 8)


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_encode_group_with_a_wrong_dtype_refused(field: str) -> None:
    good = decode_group(a_group())
    for dtype in (np.float64, np.int64):
        bad = replace(good.responses[1], **{field: getattr(good.responses[1], field).astype(dtype)})
        with pytest.raises(WireError, match="expected some, of one dtype"):
            encode_group(replace(good, responses=(good.responses[0], bad)))


def test_encode_group_of_strided_and_big_endian_arrays_is_exact() -> None:
    good = decode_group(a_group())
    odd = replace(good.responses[0], token_ids=np.array([7, 0, 6, 0, 5, 0], dtype=">i4")[4::-2])
    assert same(decode_group(encode_group(replace(good, responses=(odd, good.responses[1])))), good)


def test_answers_round_trip_is_exact() -> None:
    answers = (EvalAnswer(3, True, 0.25, False, 4, 6), EvalAnswer(1, False, None, None, 0, INT64_MAX))
    for each in (EvalAnswers(4, 7, answers), EvalAnswers(0, 0, ())):
        assert decode_answers(encode_answers(each)) == each


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": -1},
        {"truncated": 0},
        {"reward": float("nan")},
        {"reward": True},
        {"correct": 1},
        {"versions": [3]},
        {"versions": [4, 3]},
        {"versions": [-1, 3]},
        {"versions": [True, 3]},
        {"versions": [3, 2**63]},
    ],
)
def test_decode_answers_with_one_bad_answer_refused_naming_it(changes: dict[str, Any]) -> None:
    good = {"tokens": 3, "truncated": False, "reward": 1.0, "correct": None, "versions": [3, 4]}
    body = {"version": 3, "index": 7}
    decode_answers(pack("answers", {**body, "answers": [good]}))
    with pytest.raises(WireError, match=r"^answers 7: answer 1"):
        decode_answers(pack("answers", {**body, "answers": [good, {**good, **changes}]}))
