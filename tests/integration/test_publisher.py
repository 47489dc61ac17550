"""The publisher brings every version to whoever lives, leaves out whoever does not answer, and serves newcomers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from weight_helpers import Flaw, PlainGenerator

from broker import Broker
from common.config import Config
from common.log import Logger
from learner.publisher import PublishError, WeightPublisher

Weights = dict[str, torch.Tensor]


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        weights={"backend": "gloo", "timeout_s": 3, "bucket_mb": 1},
        broker={"heartbeat_s": 0.2, "member_ttl_s": 1.0},
    )


@pytest.fixture
def run(config: Config) -> Iterator[Broker]:
    broker = Broker.connect(config)
    yield broker
    broker.close()


@pytest.fixture
def publisher(run: Broker, config: Config) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(run, config, Logger("test", "learner"))
    yield publisher
    publisher.close()


@pytest.fixture
def generator(run: Broker) -> Iterator[Callable[..., PlainGenerator]]:
    made: list[PlainGenerator] = []

    def make(name: str, flaw: Flaw | None = None) -> PlainGenerator:
        made.append(PlainGenerator(run, name, flaw))
        return made[-1]

    yield make
    for one in made:
        one.close()


def weights(seed: int) -> Weights:
    """Two and a half buckets, one tensor larger than a bucket, and a tied one."""
    rng = torch.Generator().manual_seed(seed)
    out = {name: torch.randn(rows, 300, generator=rng) for name, rows in (("a", 700), ("b", 2000), ("c", 5))}
    out["lm_head.weight"] = out["a"]
    return out


def publish(publisher: WeightPublisher, version: int, tensors: Weights) -> None:
    publisher.publish(version, tensors.items(), torch.bfloat16)


def assert_received(received: Weights, sent: Weights) -> None:
    assert received.keys() == sent.keys() - {"lm_head.weight"}
    for name, tensor in received.items():
        assert torch.equal(tensor, sent[name].to(torch.bfloat16)), name


def test_publish_two_generators_both_hold_every_version(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    both = [generator("g1"), generator("g2")]
    for version in range(3):
        publish(publisher, version, weights(version))
        publisher.wait(20)
        for one in both:
            assert_received(one.wait_for(version), weights(version))
    assert [len(one.forms) for one in both] == [1, 1], "the group is kept while its members are the same"
    assert publisher.timings is not None
    assert (publisher.timings.version, publisher.timings.members, publisher.timings.dropped) == (2, 2, 0)


def test_publish_source_changed_after_return_sends_the_copy(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    one, tensors = generator("g1"), weights(1)
    publish(publisher, 1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert_received(one.wait_for(1), weights(1))


def test_fill_gathered_tensors_freed_one_by_one_none_taken_for_tied(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    one = generator("g1")
    publisher.publish(1, ((f"w{i}", torch.full((64, 64), float(i))) for i in range(50)), torch.float32)
    received = one.wait_for(1)
    assert [float(received[f"w{i}"].mean()) for i in range(50)] == [float(i) for i in range(50)]


def test_newcomer_between_publishes_gets_the_last_version_alone(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    first = generator("g1")
    publish(publisher, 4, weights(4))
    first.wait_for(4)
    late = generator("g2")
    assert_received(late.wait_for(4), weights(4))
    assert len(first.forms) == 1
    publish(publisher, 5, weights(5))
    for one in (first, late):
        assert_received(one.wait_for(5), weights(5))


@pytest.mark.parametrize("flaw", ["deaf", "dies", "mute"])
def test_member_fails_in_an_update_survivor_gets_it_and_the_next(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator], flaw: Flaw
) -> None:
    survivor, other = generator("g1"), generator("g2", flaw)
    started = time.monotonic()
    publish(publisher, 1, weights(1))
    publisher.wait(20)
    assert time.monotonic() - started < 10
    assert_received(survivor.wait_for(1), weights(1))
    publish(publisher, 2, weights(2))
    publisher.wait(2)  # the one that was left out costs nothing now
    assert_received(survivor.wait_for(2), weights(2))
    assert not other.weights


# Once it has the weights, a group with both may be formed ahead of the next version.
@pytest.mark.parametrize(("flaw", "groups"), [("damaged", (2, 3)), ("always damaged", (2,))])
def test_member_receives_other_bytes_is_sent_them_again_and_left_out_if_that_repeats(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator], flaw: Flaw, groups: tuple[int, ...]
) -> None:
    sound, other = generator("g1"), generator("g2", flaw)
    publish(publisher, 1, weights(1))
    publisher.wait(10)
    assert_received(sound.wait_for(1), weights(1))
    assert len(other.forms) in groups
    if flaw == "damaged":
        assert_received(other.wait_for(1), weights(1))
    else:
        assert not other.weights


def test_newcomer_deaf_new_version_is_not_kept_waiting(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    one = generator("g1")
    publish(publisher, 1, weights(1))
    one.wait_for(1)
    deaf = generator("g2", "deaf")
    while not deaf.forms:
        assert not deaf.done.wait(0.05)
    started = time.monotonic()
    publish(publisher, 2, weights(2))
    assert time.monotonic() - started < 1.5
    assert_received(one.wait_for(2), weights(2))


def test_only_generator_deaf_from_the_start_says_what_to_check(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    generator("g1", "deaf")
    publish(publisher, 0, weights(0))
    with pytest.raises(PublishError, match=r"weights\.host"):
        publisher.wait(20)


def test_publish_nobody_there_returns_and_serves_later(
    publisher: WeightPublisher, generator: Callable[..., PlainGenerator]
) -> None:
    publish(publisher, 0, weights(0))
    publisher.wait(5)
    assert_received(generator("g1").wait_for(0), weights(0))
