"""Entries that are no group of the run cost one group at most, and the dead letter says which entry and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from broker_helpers import group, ids, lease, prompt, release, submit

from broker import Broker
from common import wire


def test_foreign_groups_that_wait_are_not_outstanding(broker: Broker) -> None:
    submit(broker, 2)
    for _ in range(3):
        broker._client.xadd(broker.keys.groups, {"g": "000000000", "p": b"\xc1"})
    assert (broker.ledger().outstanding, broker.ledger().balanced) == (2, True)
    epoch = broker.begin(0, [])
    broker.step(epoch, 1, broker.take(epoch, 1, 0))  # the others are neither trained nor refused yet
    assert (broker.ledger().outstanding, broker.ledger().balanced) == (1, True)
    assert len(broker.take(epoch, 10, 0)) == 1
    assert (broker.ledger().outstanding, broker.ledger().dead, broker.queues().dead_letters) == (1, 0, 3)
    assert all("another entry" in each.error for each in broker.dead_letters())


def _field(data: bytes, name: bytes, old: bytes, new: bytes) -> bytes:
    """`data` with `old`, which follows the key `name`, replaced."""
    at = data.index(old, data.index(name))
    return data[:at] + new + data[at + len(old) :]


GOOD = wire.encode_group(group("000000000"))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (GOOD[:100], "ends after 100 bytes"),
        (GOOD[:-1], "promises 16 bytes"),
        (b"not msgpack at all", "followed by 17 bytes"),
        (_field(GOOD, b"logprobs", b"f4", b"f8"), "logprobs: dtype is 'f8'; expected 'f4'"),
        (_field(GOOD, b"tokens", b"\xa1s\x04", b"\xa1s\xff"), "length -1"),
        (_field(GOOD, b"tokens", (16).to_bytes(4), (2**30).to_bytes(4)), "promises 1073741824 bytes"),
        (_field(GOOD, b"\xa1v", b"\x02", b"\x03"), "schema version 3; this headrace reads 2"),
        (wire.encode_group(group("000000007")), "group 000000007 came under the id 000000000"),
        (wire.encode_group(group("000000000", size=1)), "group 000000000: 1 responses; expected 2"),
        (wire.encode_group(replace(group("000000000"), prompt_ids=np.array([], np.int32))), "prompt: is empty"),
        (b"\xc6" + (2**20).to_bytes(4) + bytes(2**20), "group message is a bytes; expected a map"),
    ],
    ids=["cut", "short", "foreign", "dtype", "negative", "1GB", "newer", "id", "size", "empty-prompt", "large"],
)
def test_take_of_a_bad_group_costs_that_group_and_says_why(broker: Broker, payload: bytes, reason: str) -> None:
    release(broker, 2)
    bad, good = lease(broker, 2)
    assert broker._submit("g1", bad, payload)
    assert broker.submit("g1", good, group(good.prompt.group_id))
    entry_id = broker._client.xrange(broker.keys.groups, count=1)[0][0].decode()
    assert ids(broker.take(broker.begin(0, []), 10, 0)) == [good.prompt.group_id]
    assert (broker.ledger().dead, broker.ledger().outstanding, broker.ledger().balanced) == (1, 1, True)
    (_, letter), *others = broker._client.xrange(broker.keys.dead)
    assert not others
    assert letter[b"error"].decode().startswith(f"entry {entry_id}: ") and reason in letter[b"error"].decode()
    assert letter[b"g"] == b"000000000" and letter[b"p"] == payload[: len(letter[b"p"])]
    assert len(letter[b"p"]) >= min(len(payload), 65_000)
    assert sum(map(len, letter.values())) < 66_000


def test_lease_of_an_empty_prompt_costs_that_prompt_and_says_why(broker: Broker) -> None:
    empty = replace(prompt(0), token_ids=np.array([], np.int32))
    assert broker.release([empty, prompt(1)], 0)
    assert [each.prompt.group_id for each in broker.lease("g1", 10, 0)] == ["000000001"]
    assert (broker.ledger().dead, broker.ledger().outstanding, broker.ledger().balanced) == (1, 1, True)
    assert broker.dead_letters()[0].error == "prompt 000000000: prompt: is empty; expected at least one token"


def test_lease_of_a_foreign_prompt_is_not_counted_whatever_its_id(broker: Broker) -> None:
    release(broker, 1)
    broker._client.xadd(broker.keys.prompts, {"g": "stranger", "p": bytes(100_000)})
    assert [each.prompt.group_id for each in broker.lease("g1", 10, 0)] == ["000000000"]
    assert (broker.ledger().dead, broker.ledger().outstanding, broker.ledger().balanced) == (0, 1, True)
    (letter,) = broker.dead_letters()
    assert (letter.kind, letter.group_id, letter.prompt) == ("foreign", "stranger", None)


def test_prompt_of_a_large_damaged_group_is_kept_whole(broker: Broker) -> None:
    large = replace(prompt(0), text="x" * 100_000)
    assert broker.release([large], 0)
    (held,) = lease(broker, 1)
    assert broker._submit("g1", held, bytes(100_000))
    assert broker.take(broker.begin(0, []), 10, 0) == []
    (letter,) = broker.dead_letters()
    assert letter.prompt is not None and letter.prompt.text == large.text
    assert broker.retry_dead(letter) and broker.ledger().balanced
