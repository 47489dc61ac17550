"""The bucket plan is the same at both ends and loses nothing; the group sends it without the default group."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.distributed as dist

from common.errors import WireError
from common.weightwire import (
    GlooGroup,
    MissingRanksError,
    Parameter,
    bucket_size,
    describe,
    parse,
    plan_buckets,
    receive_buckets,
    send_buckets,
)
from generator.receive import StagedReceive

PARAMETERS = [
    Parameter("embed", "float32", (100, 8)),
    Parameter("norm", "float32", (3,)),
    Parameter("scale", "bfloat16", (5,)),
    Parameter("head", "float32", (7, 9)),
    Parameter("scalar", "float16", ()),
]


@pytest.mark.parametrize("bucket_bytes", [1, 256, 1000, 1 << 20])
def test_plan_any_bucket_size_slots_disjoint_and_complete(bucket_bytes: int) -> None:
    plan = plan_buckets(PARAMETERS, bucket_bytes)
    assert [slot.parameter for slots in plan for slot in slots] == PARAMETERS
    for number, slots in enumerate(plan):
        assert all(slot.bucket == number for slot in slots)
        assert all(a.end <= b.offset for a, b in itertools.pairwise(slots))
        assert len(slots) == 1 or bucket_size(slots) <= bucket_bytes


def test_parse_describe_round_trip() -> None:
    assert parse(**describe(PARAMETERS)) == PARAMETERS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "told"),
    [
        (["a"], ["float32", "float32"], [[1]], "1 names, 2 dtypes"),
        ([], [], [], "at least 1"),
        (["a", "a"], ["float32"] * 2, [[1], [1]], "twice"),
        (["a"], ["load"], [[1]], "dtype 'load'"),
        (["a"], ["float32"], [[-1]], "shape [-1]"),
        (["a"], ["float32"], [[1 << 40]], "at most 1000"),
    ],
)
def test_parse_bad_announcement_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], told: str
) -> None:
    with pytest.raises(WireError) as error:
        parse(names, dtypes, shapes, max_elements=1000)
    assert told in str(error.value)


def test_broadcast_two_receivers_get_equal_weights_default_group_untouched() -> None:
    plan = plan_buckets(PARAMETERS, 512)
    buckets = [torch.randint(0, 255, (bucket_size(slots),), dtype=torch.uint8) for slots in plan]
    sender = GlooGroup.listen("127.0.0.1", 3, timeout_s=10)
    received: dict[int, list[torch.Tensor]] = {}

    def receive(rank: int) -> None:
        group = GlooGroup.join("127.0.0.1", sender.port, rank, 3, timeout_s=10)
        received[rank] = list(receive_buckets(group, plan))
        group.barrier()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    sender.connect()
    send_buckets(sender, buckets)
    for thread in threads:
        thread.join(10)
    assert not dist.is_initialized()
    for rank in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(received[rank], buckets, strict=True))


def test_receive_again_same_memory_unless_a_thread_may_still_write_into_it() -> None:
    plan = plan_buckets(PARAMETERS, 512)
    received: list[list[torch.Tensor]] = []
    before: StagedReceive | None = None
    for version, world_size in enumerate((2, 2, 3, 2)):
        sender = GlooGroup.listen("127.0.0.1", world_size, timeout_s=2)
        receive = StagedReceive("127.0.0.1", sender.port, 1, world_size, 10, before)
        if world_size == 2:
            sender.connect()
            buckets = [torch.full((bucket_size(slots),), version, dtype=torch.uint8) for slots in plan]
            receive.stage(plan, version)
            send_buckets(sender, buckets)
            sender.barrier()
            received.append(receive.take())
            assert all(torch.equal(a, b) for a, b in zip(received[-1], buckets, strict=True))
        before = receive  # that of the third group still waits for the rank that never comes
    first, second, last = ([bucket.data_ptr() for bucket in buckets] for buckets in received)
    assert first == second
    assert not set(first) & set(last)


def test_connect_member_missing_named_within_deadline() -> None:
    sender = GlooGroup.listen("127.0.0.1", 2, timeout_s=1)
    with pytest.raises(MissingRanksError) as error:
        sender.connect()
    assert error.value.ranks == [1]


def test_send_receiver_silent_raises_within_deadline() -> None:
    sender = GlooGroup.listen("127.0.0.1", 2, timeout_s=1)
    joined: list[GlooGroup] = []
    thread = threading.Thread(
        target=lambda: joined.append(GlooGroup.join("127.0.0.1", sender.port, 1, 2, timeout_s=1))
    )
    thread.start()
    sender.connect()
    thread.join(10)
    with pytest.raises(RuntimeError):
        send_buckets(sender, [torch.zeros(64 << 20, dtype=torch.uint8)])
