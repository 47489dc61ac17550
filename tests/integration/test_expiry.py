"""Nothing lost, nothing twice: groups that expire, trained groups that settle, what an audit says about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from broker_helpers import MakeConfig, TwiceBroker, group, ids, lease, prompt, release, submit
from rich.console import Console

from broker import Broker
from broker.audit import report, watch
from broker.budget import may_release
from learner.collector import Batch
from learner.settling import Settling


@pytest.fixture
def twice(make_config: MakeConfig) -> Iterator[TwiceBroker]:
    broker = TwiceBroker.connect(make_config())
    yield broker
    broker.close()


def known(broker: Broker) -> int:
    """Outstanding groups as they are known by id; the ledger counts them by the streams."""
    return int(broker._client.zcard(broker.keys.outstanding))


# -- expired


def test_expire_releases_the_same_prompt_again_under_the_current_version(twice: TwiceBroker) -> None:
    (group_id,) = submit(twice, 1)
    epoch = twice.begin(7, [])
    (delivery,) = twice.take(epoch, 1, 0)
    twice.expire(epoch, [delivery])
    ledger = twice.ledger()
    assert ledger.balanced
    assert (ledger.released, ledger.rereleased, ledger.expired, ledger.outstanding, known(twice)) == (2, 1, 1, 1, 1)
    assert may_release(ledger, twice.config) == twice.config.max_outstanding - 1, "the budget counts it"
    assert twice.position() == 1, "it is no new prompt of the source"
    assert twice.outstanding_until([6, 7]) == [0, 1]

    (again,) = lease(twice, 1)
    assert again.prompt.token_ids.tolist() == [1, 2, 3]
    found = again.prompt
    assert (found.group_id, found.text, found.columns) == (group_id, "0 + 1 =", {"answer": "0"})
    assert (found.attempt, found.released_version) == (0, 7)
    assert twice.submit("g1", again, group(group_id, version=7))
    (fresh,) = twice.take(epoch, 1, 0)
    twice.step(epoch, 8, [fresh])
    ledger = twice.ledger()
    assert (ledger.balanced, ledger.trained, ledger.outstanding, known(twice)) == (True, 1, 0, 0)


def test_expire_again_and_again_is_visible_until_the_prompt_ends(twice: TwiceBroker) -> None:
    submit(twice, 1)
    epoch = twice.begin(0, [])
    for times in range(1, 5):
        twice.expire(epoch, twice.take(epoch, 1, 0))
        assert twice.unfinished().expiries == {"000000000": times}
        (each,) = lease(twice, 1)
        assert each.prompt.attempt == 0, "expiring is no failure of the prompt"
        assert twice.submit("g1", each, group("000000000"))
    assert "000000000 most often (4 times)" in report(twice)[0]
    taken = twice.take(epoch, 1, 0)
    twice.step(epoch, 1, taken)
    assert twice.unfinished().expiries == {"000000000": 4}, "its effect may still be lost"
    twice.settle(epoch, ids(taken))
    assert twice.unfinished().expiries == {}
    assert (twice.ledger().rereleased, twice.ledger().released, twice.ledger().balanced) == (4, 5, True)


def test_discard_counts_as_expired_and_does_not_come_back(twice: TwiceBroker) -> None:
    submit(twice, 1)
    epoch = twice.begin(0, [])
    twice.discard(epoch, twice.take(epoch, 1, 0))
    ledger = twice.ledger()
    assert (ledger.released, ledger.rereleased, ledger.expired, ledger.outstanding, known(twice)) == (1, 0, 1, 0, 0)
    assert ledger.balanced and twice.lease("g1", 1, 0) == []


def test_late_result_of_a_lease_from_before_the_expiry_is_a_duplicate(make_config: MakeConfig) -> None:
    broker = TwiceBroker.connect(make_config(broker={"lease_ttl_s": 0.001, "member_ttl_s": 60.0}))
    release(broker, 1)
    (old,) = lease(broker, 1, "slow")
    while broker.queues().prompts_leased:
        broker.reclaim()
    (each,) = lease(broker, 1, "fast")
    assert broker.submit("fast", each, group("000000000"))
    epoch = broker.begin(0, [])
    broker.expire(epoch, broker.take(epoch, 1, 0))
    (again,) = lease(broker, 1, "fast")
    assert not broker.submit("slow", old, group("000000000"))
    assert broker.submit("fast", again, group("000000000"))
    assert (broker.ledger().duplicates, broker.ledger().outstanding, broker.ledger().balanced) == (1, 1, True)
    assert "1 duplicates discarded" in report(broker)[0]


def test_infrastructure_failures_cost_a_prompt_no_attempt(make_config: MakeConfig) -> None:
    broker = TwiceBroker.connect(make_config(broker={"lease_ttl_s": 0.001, "member_ttl_s": 60.0, "max_attempts": 2}))
    release(broker, 1)
    for _ in range(3):
        (each,) = lease(broker, 1)
        broker.give_back("g1", each.entry_id, each.prompt)
        lease(broker, 1, "killed")
        while broker.queues().prompts_leased:  # each call is a round trip; the lease is 1 ms old within a few
            broker.reclaim()
    (each,) = lease(broker, 1)
    assert (each.prompt.attempt, broker.ledger().dead, broker.ledger().balanced) == (0, 0, True)


# -- settled


def batch(broker: Broker, epoch: int, count: int) -> Batch:
    return Batch(tuple(broker.take(epoch, count, 0)), 0.0)


def settling(make_config: MakeConfig, on: str) -> tuple[Broker, int, Settling]:
    broker = TwiceBroker.connect(make_config(learner={"settle_on": on}))
    epoch = broker.begin(0, [])
    return broker, epoch, Settling(broker, epoch, broker.config)


def test_settle_on_checkpoint_resume_skips_what_the_checkpoint_names_and_repeats_the_rest(
    make_config: MakeConfig,
) -> None:
    broker, epoch, settled = settling(make_config, "checkpoint")
    first, second, third, fourth = submit(broker, 4)
    settled.trained(1, batch(broker, epoch, 1))
    settled.saved("checkpoint", settled.ids)
    assert (broker.ledger().settled, settled.ids, settled.all_settled) == (1, (first,), True)
    settled.trained(2, batch(broker, epoch, 1))
    named = settled.ids  # in the checkpoint of version 2; the learner dies before it settles them
    assert (named, settled.all_settled) == ((first, second), False), "named while the server may lose its settling"
    settled.trained(3, batch(broker, epoch, 1))
    assert (broker.ledger().trained, broker.ledger().settled, known(broker)) == (3, 1, 1)

    epoch = broker.begin(2, named)
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, ledger.outstanding, known(broker), ledger.balanced) == (2, 2, 2, 2, True)
    assert ids(broker.take(epoch, 9, 0)) == [third, fourth], "each group is in the surviving weights exactly once"


def test_settle_on_step_resume_repeats_nothing(make_config: MakeConfig) -> None:
    broker, epoch, settled = settling(make_config, "step")
    _, _, third = submit(broker, 3)
    for version in (1, 2):
        settled.trained(version, batch(broker, epoch, 1))
        assert (broker.ledger().settled, len(settled.ids), settled.all_settled) == (version, version, True)
    epoch = broker.begin(0, [])  # from a checkpoint older than both steps
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, ledger.outstanding, ledger.balanced) == (2, 2, 1, True)
    assert ids(broker.take(epoch, 9, 0)) == [third], "at most once: what a crash lost is not sampled again"


def test_begin_gives_unsettled_groups_their_release_versions_back(twice: TwiceBroker) -> None:
    assert twice.release([replace(prompt(i), released_version=3 + i) for i in range(2)], 0) is False  # the second copy
    for each in lease(twice, 2):
        assert twice.submit("g1", each, group(each.prompt.group_id))
    epoch = twice.begin(4, [])
    twice.step(epoch, 5, twice.take(epoch, 2, 0))
    assert twice.outstanding_until([9]) == [0]
    twice.begin(4, [])
    assert twice.outstanding_until([2, 3, 4]) == [0, 1, 2]


# -- audit


def test_audit_says_where_the_oldest_group_is(twice: TwiceBroker) -> None:
    def places() -> list[str | None]:
        found = twice.unfinished()
        return [each and each.place for each in (found.outstanding, found.unsettled)]

    assert places() == [None, None]
    release(twice, 70)  # more than one page of the stream
    assert places() == ["queued prompt", None]
    for each in lease(twice, 1):
        assert places() == ["leased by g1", None]
        assert twice.submit("g1", each, group(each.prompt.group_id))
    assert places() == ["group in the stream", None]
    epoch = twice.begin(0, [])
    taken = twice.take(epoch, 1, 0)
    assert places() == [f"taken by the learner (epoch-{epoch})", None]
    twice.step(epoch, 1, taken)
    assert places() == ["queued prompt", "trained, and in no durable checkpoint yet"]
    for each in lease(twice, 69):
        twice.give_back("g1", each.entry_id, each.prompt)
    oldest = twice.unfinished().outstanding
    assert oldest is not None and oldest.group_id == "000000001" and 0 <= oldest.age_s < 60
    assert "oldest outstanding group: 000000001, " in report(twice)[0]


def test_audit_of_a_lost_group_names_it(broker: Broker) -> None:
    release(broker, 1)
    broker._client.xtrim(broker.keys.prompts, maxlen=0)
    text, balanced = report(broker)
    assert not balanced
    assert "000000000, 0.0 s old: LOST" in text


@pytest.mark.parametrize("lost", [0, 1])
def test_audit_watch_shows_it_anew_until_interrupted(broker: Broker, lost: int) -> None:
    console, rounds = Console(record=True, width=120, force_terminal=True), iter(range(3))

    def pause() -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        release(broker, 1)

    release(broker, 1)
    broker._client.hincrby(broker.keys.ledger, "released", lost)
    assert watch(broker, console, pause) is (lost == 0)
    text = console.export_text()
    assert all(f"released{' ' * 18}{count:>10}" for count in (1 + lost, 4 + lost))
    assert "outstanding                       4" in text


def test_expiry_leaves_no_trace_of_groups_that_ended(twice: TwiceBroker) -> None:
    submit(twice, 3)
    epoch = twice.begin(0, [])
    twice.expire(epoch, twice.take(epoch, 3, 0))
    first, second, third = lease(twice, 3)
    twice.filtered("g1", first.entry_id, "wrong")
    twice.fail("g1", second.entry_id, replace(second.prompt, attempt=2), "bad")
    twice.submit("g1", third, group(third.prompt.group_id))
    twice.begin(1, [third.prompt.group_id])
    for key in (twice.keys.expiries, twice.keys.outstanding, twice.keys.unsettled, twice.keys.arrived):
        assert not twice._client.exists(key), key
    assert twice.ledger().balanced and twice.ledger().outstanding == 0
