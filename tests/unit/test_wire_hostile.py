"""Bytes that are no message of ours are refused with a WireError that says what is wrong, fast and in little memory."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import a_group, a_prompt

from common.errors import WireError
from common.trajectory import EvalAnswer, EvalAnswers
from common.wire import decode_answers, decode_group, decode_prompt, encode_answers, pack, unpack

plain = st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
trees = st.recursive(
    plain, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3), max_leaves=6
)

DECODERS: list[Callable[[bytes], Any]] = [decode_prompt, decode_group, decode_answers]


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=200))
def test_decode_random_bytes_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


FIELDS = ["id", "ids", "prompt", "size", "lengths", "tokens", "logprobs", "runs", "text", "columns", "answers", "index"]


@given(tree=st.dictionaries(st.sampled_from(FIELDS), trees))
def test_decode_map_of_wrong_kinds_refused(tree: dict[str, Any]) -> None:
    for kind, decode in (("prompt", decode_prompt), ("group", decode_group), ("answers", decode_answers)):
        with pytest.raises(WireError):
            decode(pack(kind, tree))


def mutated(data: st.DataObject, valid: bytes) -> bytes:
    """`valid` with bytes changed, inserted and removed, and cut somewhere."""
    raw = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        replaced = data.draw(st.integers(0, 4))
        raw[position : position + replaced] = data.draw(st.binary(max_size=6))
        if not raw:
            break
    return bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])


@settings(max_examples=200)
@given(data=st.data())
def test_decode_mutated_group_refused_or_still_sound(data: st.DataObject) -> None:
    try:
        group = decode_group(mutated(data, a_group()))
    except WireError:
        return
    for response in group.responses:
        assert len(response.token_versions()) == len(response.logprobs) == len(response.token_ids) >= 1
        assert response.token_ids.min() >= 0 and np.isfinite(response.logprobs).all()
        assert response.versions[0].start == 0


@given(data=st.data())
def test_decode_mutated_prompt_and_answers_refused_or_read(data: st.DataObject) -> None:
    answers = EvalAnswers(4, 7, (EvalAnswer(3, True, 0.25, False, 4, 6),))
    for decode, valid in ((decode_prompt, a_prompt()), (decode_answers, encode_answers(answers))):
        with contextlib.suppress(WireError):
            decode(mutated(data, valid))


def repeated(head: bytes, each: bytes, count: int) -> bytes:
    return b"\x83\xa1v\x02\xa1t\xa5group\xa1x" + head + each * count


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (a_group()[:-1], "promises 16 bytes at byte"),
        (b"\x81\xa1b\xc6\x40\x00\x00\x00", "promises 1073741824 bytes at byte 3; 0 follow"),
        (b"\x81\xa1b\xdb\x40\x00\x00\x00ab", "promises 1073741824 bytes of text at byte 3; 2 follow"),
        (b"\xdd\x40\x00\x00\x00", "holds at least 1073741825 values"),
        (b"\xdf\x40\x00\x00\x00", "holds at least 2147483649 values"),
        (repeated(b"\xdd\x00\x40\x00\x00", b"\x80", 2**22), "holds at least"),  # empty maps, 64 times as large
        (b"\xdc\xff\xff" * 1000 + bytes(70_000), "holds at least"),  # lists in lists, each of 65535
        (b"\x91" * 1_000_000, "holds at least"),
        (b"\xc7\xff\x01" + bytes(255), "extension"),
        (a_group() + bytes(10**6), "followed by 1000000 bytes more"),
        (b"\xc6\x01\x00\x00\x00" + bytes(2**24), "is a bytes; expected a map"),  # costs its own length
    ],
    ids=["cut", "1GB", "1GB-text", "list", "map", "empty-maps", "nested-65535", "nested", "extension", "tail", "bytes"],
)
@pytest.mark.parametrize("kind", ["group", "prompt"])
def test_unpack_of_a_hostile_message_costs_a_few_megabytes_and_says_why(kind: str, data: bytes, reason: str) -> None:
    """Beyond the message itself, which is in memory already."""
    own = len(data) if "expected a map" in reason else 0
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=reason):
            unpack(data, kind)
        assert tracemalloc.get_traced_memory()[1] < own + 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\x7f\xff\xff\xff",  # an array said to hold 2**31 - 1 values
        b"\xdf\x7f\xff\xff\xff",  # a map of as many
        b"\xc6\x7f\xff\xff\xff",  # as many bytes
        b"\x91" * 100_000,  # nested deeper than any stack
        b"\x81\x01\x02",  # a key that is not a string
        b"\xd6\xff\x00\x00\x00\x00",  # a time stamp
        b"\x80\x80",  # two messages
        b"\x81\xa1v\xa2\xff\xfe",  # not UTF-8
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00K\x01.",  # a pickle
    ],
)
@pytest.mark.parametrize("decode", DECODERS)
def test_decode_hostile_header_refused_at_once(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)
