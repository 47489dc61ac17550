"""What the broker's tests share: prompts, groups, and calls sent twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from broker import Broker, Delivery, Lease
from common.config import Config
from common.trajectory import (
    NOTHING_YET,
    FinishReason,
    Group,
    PartialGroup,
    PartialResponse,
    Prompt,
    Response,
    VersionRun,
)

MakeConfig = Callable[..., Config]


def prompt(position: int) -> Prompt:
    token_ids = np.array([1, 2, 3], dtype=np.int32)
    return Prompt(f"{position:09d}", token_ids, f"{position} + 1 =", {"answer": str(position)})


def group(group_id: str, version: int = 0, size: int = 2) -> Group:
    response = Response(
        token_ids=np.array([4, 5], dtype=np.int32),
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        versions=(VersionRun(version, 0),),
        finish_reason="stop",
        raw_reward=1.0,
        reward=1.0,
        correct=True,
    )
    return Group(group_id, np.array([1, 2, 3], dtype=np.int32), (response,) * size, "g1", 1.0, time.time())


def partial_response(tokens: int, *versions: tuple[int, int], finish: FinishReason | None = None) -> PartialResponse:
    """The first `tokens` of a response, at (version, first token) `versions`; by default all at version 0."""
    runs = tuple(VersionRun(*each) for each in versions or ((0, 0),))
    token_ids = np.arange(4, 4 + tokens, dtype=np.int32)
    return PartialResponse(token_ids, np.full(tokens, -0.5, dtype=np.float32), runs, finish)


def partial_group(group_id: str, *responses: PartialResponse) -> PartialGroup:
    """By default: of its two responses one has five tokens, the other none yet."""
    return PartialGroup(group_id, responses or (partial_response(5), NOTHING_YET), 1.0)


def release(broker: Broker, count: int) -> None:
    position = broker.position()
    broker.release([prompt(position + i) for i in range(count)], position)
    assert broker.position() == position + count


def lease(broker: Broker, count: int, consumer: str = "g1") -> list[Lease]:
    leases = broker.lease(consumer, count, 0)
    assert len(leases) == count
    return leases


def submit(broker: Broker, count: int, consumer: str = "g1") -> list[str]:
    """Release, lease and submit `count` prompts; returns their group ids."""
    release(broker, count)
    leases = lease(broker, count, consumer)
    for each in leases:
        assert broker.submit(consumer, each, group(each.prompt.group_id))
    return [each.prompt.group_id for each in leases]


def ids(deliveries: Sequence[Delivery]) -> list[str]:
    return [each.group.group_id for each in deliveries]


class TwiceBroker(Broker):
    """Sends every script twice, as the client does when a reply is lost, and uses the second reply."""

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        super()._run(script, keys, args)
        return super()._run(script, keys, args)
