"""Unfinished work changes hands: what is kept beside a prompt, how long, and how a generator leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from broker_helpers import (
    MakeConfig,
    TwiceBroker,
    group,
    lease,
    partial_group,
    partial_response,
    prompt,
    release,
)
from typer.testing import CliRunner
from valkey_helpers import until

from broker import Broker, BrokerFullError, Delivery, Lease
from broker.cli import drain
from common import wire, wirepartial
from common.config import Config
from common.errors import HeadraceError
from common.log import Logger
from common.trajectory import NOTHING_YET, PartialGroup, Prompt
from generator.handover import Handover, Work
from generator.loop import Generator
from tests.chaos.players import LOGPROB, LightEngine, LightPublisher, LightRewards, LightTransfer
from tests.chaos.prompts import fate, response_tokens


@pytest.fixture
def twice(make_config: MakeConfig) -> Iterator[TwiceBroker]:
    broker = TwiceBroker.connect(make_config())
    yield broker
    broker.close()


def kept(broker: Broker) -> dict[str, int]:
    """Tokens kept beside prompts, by group id."""
    found = broker._client.hgetall(broker.keys.partial)
    return {
        name.decode(): wirepartial.decode_partial(data, name.decode(), broker.config.sampling.group_size).tokens
        for name, data in found.items()
    }


def held_with_partial(broker: Broker, consumer: str = "g1") -> Lease:
    release(broker, 1)
    (held,) = lease(broker, 1, consumer)
    assert held.partial is None
    assert broker.keep_partial(consumer, held.entry_id, partial_group(held.prompt.group_id))
    return held


# -- beside the prompt


def test_given_back_prompt_brings_what_was_sampled_to_its_next_holder(twice: TwiceBroker) -> None:
    held = held_with_partial(twice)
    left = partial_group(held.prompt.group_id, partial_response(3, (1, 0), (2, 2)), partial_response(2, finish="stop"))
    assert twice.keep_partial("g1", held.entry_id, left)  # in the place of what was kept before
    twice.give_back("g1", held.entry_id, held.prompt)
    (again,) = lease(twice, 1, "g2")
    assert again.partial is not None and again.prompt.attempt == 0
    assert wirepartial.encode_partial(again.partial) == wirepartial.encode_partial(left)
    assert twice.ledger().balanced and twice.ledger().outstanding == 1


def test_prompt_of_a_killed_generator_brings_it_too_and_its_late_word_is_refused(make_config: MakeConfig) -> None:
    broker = TwiceBroker.connect(make_config(broker={"lease_ttl_s": 0.001, "member_ttl_s": 60.0}))
    held = held_with_partial(broker, "slow")
    while broker.queues().prompts_leased:
        broker.reclaim()
    late = partial_group(held.prompt.group_id, partial_response(9), NOTHING_YET)
    assert not broker.keep_partial("slow", held.entry_id, late)
    (again,) = lease(broker, 1, "fast")
    assert again.partial is not None and again.partial.tokens == 5
    assert not broker.keep_partial("slow", held.entry_id, late)
    assert not broker.keep_partial("slow", again.entry_id, late), "another one's lease"
    with pytest.raises(HeadraceError, match="MISMATCH"):
        broker.keep_partial("fast", again.entry_id, partial_group("000000009"))
    assert kept(broker) == {"000000000": 5}
    broker.close()


def submitted(broker: Broker, held: Lease) -> None:
    assert broker.submit("g1", held, group(held.prompt.group_id))


def filtered(broker: Broker, held: Lease) -> None:
    assert broker.filtered("g1", held.entry_id, "equal")


def failed(broker: Broker, held: Lease) -> None:
    broker.fail("g1", held.entry_id, held.prompt, "bad")


def dead(broker: Broker, held: Lease) -> None:
    broker.fail("g1", held.entry_id, replace(held.prompt, attempt=2), "bad")


@pytest.mark.parametrize("end", [submitted, filtered, failed, dead])
def test_lease_that_ends_for_good_takes_along_what_was_kept(
    twice: TwiceBroker, end: Callable[[Broker, Lease], None]
) -> None:
    end(twice, held_with_partial(twice))
    assert kept(twice) == {} and not twice._client.exists(twice.keys.partial)
    assert twice.ledger().balanced


def test_expired_and_revived_prompts_begin_afresh(twice: TwiceBroker) -> None:
    submitted(twice, held_with_partial(twice))
    dead(twice, held_with_partial(twice))
    epoch = twice.begin(0, [])
    twice.expire(epoch, twice.take(epoch, 1, 0))
    assert twice.retry_dead(twice.dead_letters()[0])
    assert [each.partial for each in lease(twice, 2)] == [None, None]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\x93\x01\x02",
        wire.encode_prompt(prompt(0)),
        wirepartial.encode_partial(partial_group("000000001")),
        wirepartial.encode_partial(partial_group("000000000", *[partial_response(2)] * 3)),
    ],
)
def test_bytes_that_are_no_partial_group_cost_nothing_but_a_fresh_start(
    broker: Broker, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_with_partial(broker)
    broker._client.hset(broker.keys.partial, held.prompt.group_id, bad)
    broker.give_back("g1", held.entry_id, held.prompt)
    (again,) = lease(broker, 1)
    assert again.partial is None and again.prompt.attempt == 0
    assert "prompt 000000000 starts afresh" in caplog.text
    submitted(broker, again)
    assert kept(broker) == {} and broker.ledger().balanced and broker.ledger().dead == 0


async def test_full_broker_is_not_waited_for(make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(broker={"max_bytes": 1000}))
    release(broker, 3)
    first, second, third = lease(broker, 3)
    large = partial_group(first.prompt.group_id, partial_response(300), NOTHING_YET)
    assert broker.keep_partial("g1", first.entry_id, large)
    with pytest.raises(BrokerFullError):
        broker.keep_partial("g1", second.entry_id, partial_group(second.prompt.group_id))
    handover = Handover(broker.config, "g1", broker, Logger("run", "g1"))
    await handover.give_back(Work(replace(third, partial=partial_group(third.prompt.group_id))))
    assert handover.counts == {"continued": 0, "handed_over": 0, "sampled_twice": 5}
    assert broker.queues().prompts_waiting == 1 and kept(broker) == {first.prompt.group_id: 300}
    # What is kept does not keep the groups out that would make room.
    submitted(broker, second)
    broker.close()


# -- generators


class Standing(LightEngine):
    """Samples `pieces` of each response and then stands still; None: all of it."""

    def __init__(self, config: Config, pieces: int | None) -> None:
        super().__init__(config, 0.0)
        self._pieces = pieces

    async def pause(self, seconds: float, done: int) -> None:
        await super().pause(3600.0 if done == self._pieces else 0.0, done)


class Station:
    """A broker with prompts, a version, and generators with light engines."""

    def __init__(self, config: Config, prompts: list[Prompt]) -> None:
        self.config, self.broker = config, Broker.connect(config)
        self.epoch = self.broker.begin(0, [])
        self.publisher = LightPublisher(self.broker, config, 0)
        assert self.broker.release(prompts, 0)

    def generator(self, name: str, pieces: int | None = None) -> Generator:
        """A generator that samples `pieces` of each response and then stands still; None: all of it."""
        engine = Standing(self.config, pieces)
        made = Generator(self.config, name, Broker.connect(self.config), Logger("run", name), engine)  # type: ignore[arg-type]
        made.rewards = LightRewards(self.config.run.seed)  # type: ignore[assignment]
        made.receiver._transfer = LightTransfer(engine)
        return made

    async def until(self, holds: Callable[[], object]) -> None:
        await asyncio.to_thread(until, holds)

    async def groups(self, count: int) -> list[Delivery]:
        """The next `count` groups; meanwhile leases of the dead are taken back."""
        taken: list[Delivery] = []

        def complete() -> bool:
            self.broker.reclaim()
            taken.extend(self.broker.take(self.epoch, 9, 100))
            return len(taken) >= count

        await self.until(complete)
        return taken


MakeStation = Callable[..., Station]


@pytest.fixture
def station(make_config: MakeConfig) -> Iterator[MakeStation]:
    made: list[Station] = []

    def make(count: int, **generator: int) -> Station:
        config = make_config(
            generator={"prompts_in_flight": 2, **generator}, broker={"heartbeat_s": 0.05, "member_ttl_s": 0.4}
        )
        trainable = [i for i in range(100) if fate(0, f"{i:09d}") == "trainable"][:count]
        prompts = [Prompt(f"{i:09d}", np.full(3, i, dtype=np.int32), f"{i}", {"answer": "0"}) for i in trainable]
        made.append(Station(config, prompts))
        return made[0]

    yield make
    for each in made:
        each.broker.close()


@asynccontextmanager
async def running(generator: Generator) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(generator.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        generator.broker.close()


def begun_somewhat(generator: Generator) -> bool:
    works = list(generator._in_flight.values())
    return len(works) == 2 and all(min(work.lengths(), default=0) > 0 for work in works)


def check_whole(deliveries: list[Delivery]) -> None:
    """Every response is what it should be, and every token has the log-probability of its stamped version."""
    for delivery in deliveries:
        for index, response in enumerate(delivery.group.responses):
            assert response.token_ids.tolist() == response_tokens(delivery.group.prompt_ids, index).tolist()
            assert response.logprobs.tolist() == (LOGPROB - response.token_versions()).tolist()


async def test_drained_generator_loses_no_token_and_its_successor_goes_on(station: MakeStation, tmp_path: Path) -> None:
    at = station(2, handoff_tokens=0)
    leaving = at.generator("g1", pieces=1)
    async with running(leaving) as task:
        await at.until(lambda: begun_somewhat(leaving))
        (member,) = at.broker.members("generator")
        assert (member.id, member.state) == ("g1", "serving")
        path = tmp_path / "run.yaml"
        path.write_text(at.config.model_dump_json(), encoding="utf-8")
        app = typer.Typer()
        app.command()(drain)
        unknown = await asyncio.to_thread(CliRunner().invoke, app, [str(path), "g9"])
        assert unknown.exit_code != 0 and "expected one of: g1" in str(unknown.exception)
        asked = await asyncio.to_thread(CliRunner().invoke, app, [str(path), "g1"])
        assert asked.exit_code == 0, asked.output
        await asyncio.wait_for(task, 5)
    assert at.broker.members("generator") == [] and at.broker._client.hlen(at.broker.keys.drains) == 0
    sampled = leaving.engine.counters()["tokens"]
    assert 0 < sampled == sum(kept(at.broker).values()) == leaving.handover.counts["handed_over"]
    assert at.broker.queues().prompts_waiting == 2

    at.publisher.publish(1)  # the seam is between two versions
    following = at.generator("g2")
    async with running(following):
        deliveries = await at.groups(2)
    check_whole(deliveries)
    versions = [[run.version for run in r.versions] for d in deliveries for r in d.group.responses]
    assert [0, 1] in versions and all(each in ([0, 1], [0], [1]) for each in versions)
    total = sum(delivery.group.response_tokens for delivery in deliveries)
    assert sampled + following.engine.counters()["tokens"] == total, "no token was sampled twice"
    assert following.handover.counts == {"continued": sampled, "handed_over": 0, "sampled_twice": 0}
    assert kept(at.broker) == {} and at.broker.ledger().balanced


async def test_killed_generator_costs_at_most_handoff_tokens_a_response(station: MakeStation) -> None:
    at = station(2, handoff_tokens=1)
    killed = at.generator("g1", pieces=1)
    async with running(killed) as task:
        await at.until(lambda: len(kept(at.broker)) == 2)
        killed.broker._run = lambda *_: 0  # type: ignore[method-assign]  # dead, as far as anybody else can tell
        task.cancel()
    left = sum(kept(at.broker).values())
    assert left
    following = at.generator("g2")
    async with running(following):
        deliveries = await at.groups(2)
    assert following.handover.counts == {"continued": left, "handed_over": 0, "sampled_twice": 0}
    check_whole(deliveries)
    total = sum(delivery.group.response_tokens for delivery in deliveries)
    assert following.engine.counters()["tokens"] == total - left
    assert kept(at.broker) == {} and at.broker.ledger().balanced and at.broker.ledger().duplicates == 0


async def test_drain_while_joining_ends_before_anything_is_taken(station: MakeStation) -> None:
    at = station(2)
    joining = at.generator("g1")
    ended = asyncio.Event()

    async def start() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    joining.engine.start = start  # type: ignore[method-assign]
    async with running(joining) as task:
        await at.until(lambda: at.broker.members("generator"))
        (member,) = at.broker.members("generator")
        assert member.state == "joining"
        at.broker.drain(replace(member, pid=member.pid + 1))  # an earlier process of its name
        await asyncio.sleep(0.2)
        assert not task.done()
        at.broker.drain(member)
        await asyncio.wait_for(task, 5)
    assert ended.is_set() and at.broker.members() == []
    assert at.broker.queues().prompts_waiting == 2


async def test_too_old_a_hand_over_is_sampled_afresh(station: MakeStation) -> None:
    at = station(1)
    (held,) = lease(at.broker, 1, "g0")
    old = replace(partial_response(2), token_ids=response_tokens(held.prompt.token_ids, 0)[:2])
    assert at.broker.keep_partial("g0", held.entry_id, PartialGroup(held.prompt.group_id, (old, NOTHING_YET), 1.0))
    at.broker.give_back("g0", held.entry_id, held.prompt)
    at.publisher.publish(3)
    generator = at.generator("g1")
    async with running(generator):
        (delivery,) = await at.groups(1)
    assert {run.version for response in delivery.group.responses for run in response.versions} == {3}
    check_whole([delivery])
    assert generator.handover.counts == {"continued": 0, "handed_over": 0, "sampled_twice": 2}


async def test_finished_siblings_stay_as_they_are(station: MakeStation) -> None:
    at = station(1)
    (held,) = lease(at.broker, 1, "g0")
    tokens = response_tokens(held.prompt.token_ids, 1)
    done = replace(
        partial_response(len(tokens), (0, 0), finish="stop"),
        token_ids=tokens,
        logprobs=np.full(len(tokens), LOGPROB, dtype=np.float32),
    )
    assert at.broker.keep_partial("g0", held.entry_id, PartialGroup(held.prompt.group_id, (NOTHING_YET, done), 1.0))
    at.broker.give_back("g0", held.entry_id, held.prompt)
    generator = at.generator("g1")
    async with running(generator):
        (delivery,) = await at.groups(1)
    check_whole([delivery])
    first, second = delivery.group.responses
    assert second.token_ids.tolist() == tokens.tolist()
    assert generator.engine.counters()["tokens"] == len(first.token_ids)
