"""The broker against a real server: conservation, fencing, redelivery, poison, members, messages."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import redis
from broker_helpers import MakeConfig, TwiceBroker, group, ids, lease, prompt, release, submit
from valkey_helpers import until

from broker import Broker, Member
from common import wire
from common.errors import ConfigError, FencedError, HeadraceError


def test_ledger_through_every_way_a_prompt_ends_stays_balanced(broker: Broker) -> None:
    release(broker, 8)
    leases = lease(broker, 8)
    kinds = ("correct", "wrong", "equal")
    for each, kind in zip(leases, kinds, strict=False):
        assert broker.filtered("g1", each.entry_id, kind)  # type: ignore[arg-type]
    for each in leases[3:6]:
        assert broker.submit("g1", each, group(each.prompt.group_id))
    broker.give_back("g1", leases[6].entry_id, leases[6].prompt)
    broker.fail("g1", leases[7].entry_id, replace(leases[7].prompt, attempt=2), "reward raised")
    assert broker.ledger().balanced

    epoch = broker.begin(0, [])
    first, second, third = broker.take(epoch, 10, 0)
    broker.expire(epoch, [first])
    broker.step(epoch, 1, [second, third])
    assert broker.settle(epoch, [second.group.group_id]) == 1

    ledger = broker.ledger()
    assert ledger.balanced
    assert (ledger.released, ledger.rereleased) == (9, 1), "what expired is released a second time"
    assert (ledger.submitted, ledger.trained, ledger.settled) == (3, 2, 1)
    assert (ledger.filtered_correct, ledger.filtered_wrong, ledger.filtered_equal) == (1, 1, 1)
    assert (ledger.expired, ledger.dead, ledger.duplicates, ledger.outstanding) == (1, 1, 0, 2)
    queues = broker.queues()
    assert (queues.prompts_waiting, queues.prompts_leased, queues.groups_waiting, queues.groups_held) == (2, 0, 0, 0)
    assert (queues.unsettled, queues.dead_letters) == (1, 1)
    assert broker.dead_letters()[0].error == "reward raised"


def test_release_from_a_stale_position_writes_nothing(broker: Broker) -> None:
    assert broker.release([prompt(0), prompt(1)], 0)
    assert not broker.release([prompt(0), prompt(1)], 0)
    assert broker.position() == 2
    assert [each.prompt.group_id for each in broker.lease("g1", 10, 0)] == ["000000000", "000000001"]


def test_lease_returns_the_prompt_that_was_released(broker: Broker) -> None:
    release(broker, 1)
    (each,) = lease(broker, 1)
    assert each.prompt.token_ids.tolist() == [1, 2, 3]
    assert (each.prompt.text, each.prompt.columns, each.prompt.attempt) == ("0 + 1 =", {"answer": "0"}, 0)


def test_fail_up_to_max_attempts_dead_letters_with_the_error(broker: Broker) -> None:
    release(broker, 1)
    for attempt in range(broker.config.broker.max_attempts):
        (each,) = lease(broker, 1)
        assert each.prompt.attempt == attempt
        broker.fail("g1", each.entry_id, each.prompt, f"failure {attempt}")
    assert broker.lease("g1", 1, 0) == []
    assert (broker.ledger().dead, broker.ledger().outstanding) == (1, 0)
    assert broker.dead_letters()[0].group_id == "000000000"
    assert broker.dead_letters()[0].error == "failure 2"


def test_give_back_leaves_attempts_unchanged(broker: Broker) -> None:
    release(broker, 1)
    for _ in range(5):
        (each,) = lease(broker, 1)
        broker.give_back("g1", each.entry_id, each.prompt)
    assert lease(broker, 1)[0].prompt.attempt == 0
    assert broker.ledger().balanced


def test_submit_of_another_lease_s_group_is_refused(broker: Broker) -> None:
    release(broker, 1)
    (each,) = lease(broker, 1)
    with pytest.raises(ValueError, match="not of 000000009"):
        broker.submit("g1", each, group("000000009"))
    assert broker.submit("g1", each, group("000000000"))


# -- leases taken back


def _expired_lease_broker(make_config: MakeConfig) -> Broker:
    return Broker.connect(make_config(broker={"lease_ttl_s": 0.001, "member_ttl_s": 60.0}))


def _reclaim(broker: Broker, count: int) -> None:
    taken: list[tuple[str, str]] = []
    while len(taken) < count:  # each call is a round trip; the leases are 1 ms old within a few
        taken += broker.reclaim()


def test_reclaimed_lease_late_results_are_duplicates_and_discarded(make_config: MakeConfig) -> None:
    broker = _expired_lease_broker(make_config)
    release(broker, 2)
    first, second = lease(broker, 2, "slow")
    _reclaim(broker, 2)
    assert not broker.submit("slow", first, group(first.prompt.group_id))
    assert not broker.filtered("slow", second.entry_id, "wrong")
    broker.give_back("slow", first.entry_id, first.prompt)  # too late as well: changes nothing
    assert broker.renew("slow", [first.entry_id]) == []
    ledger = broker.ledger()
    assert (ledger.duplicates, ledger.submitted, ledger.filtered, ledger.outstanding) == (2, 0, 0, 2)

    for each in lease(broker, 2, "fast"):
        assert broker.submit("fast", each, group(each.prompt.group_id))
    assert broker.ledger().balanced
    assert sorted(ids(broker.take(broker.begin(0, []), 10, 0))) == ["000000000", "000000001"]


def test_reclaim_with_a_living_holder_takes_nothing(broker: Broker) -> None:
    broker.heartbeat(Member("g1", "generator", "serving"))
    release(broker, 1)
    lease(broker, 1)
    assert broker.reclaim() == []


def test_reclaim_after_holder_left_waits_for_member_ttl_only(make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(broker={"lease_ttl_s": 3600.0, "member_ttl_s": 0.01}))
    broker.heartbeat(Member("g1", "generator", "serving"))
    release(broker, 1)
    (each,) = lease(broker, 1)
    broker.leave("g1")
    _reclaim(broker, 1)
    assert lease(broker, 1, "g2")[0].entry_id != each.entry_id


def test_renew_resets_idle_time_of_own_leases_only(make_config: MakeConfig) -> None:
    broker = _expired_lease_broker(make_config)
    release(broker, 2)
    (mine,), (other,) = lease(broker, 1, "g1"), lease(broker, 1, "g2")
    assert broker.renew("g1", [mine.entry_id, other.entry_id, "1-1"]) == [mine.entry_id]


# -- the learner's epochs


def test_begin_fences_every_older_incarnation(broker: Broker) -> None:
    submit(broker, 2)
    old = broker.begin(0, [])
    taken = broker.take(old, 2, 0)
    new = broker.begin(0, [])
    assert new > old
    for call in (
        lambda: broker.take(old, 1, 0),
        lambda: broker.expire(old, taken),
        lambda: broker.step(old, 1, taken),
        lambda: broker.settle(old, ids(taken)),
    ):
        with pytest.raises(FencedError, match="newer learner"):
            call()
    assert (broker.version(), broker.ledger().trained, broker.ledger().outstanding) == (0, 0, 2)


def test_begin_redelivers_what_the_checkpoint_does_not_contain(broker: Broker) -> None:
    released = submit(broker, 4)
    epoch = broker.begin(0, [])
    taken = broker.take(epoch, 4, 0)
    broker.step(epoch, 1, taken[:3])
    assert broker.ledger().outstanding == 1

    # The checkpoint that survives holds the first group only; the fourth was held, not trained.
    epoch = broker.begin(1, [released[0]])
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, ledger.outstanding, ledger.balanced) == (1, 1, 3, True)
    assert ids(broker.take(epoch, 10, 0)) == released[1:]


def test_begin_with_a_group_contained_but_never_recorded_settles_it(broker: Broker) -> None:
    """The learner died between saving the checkpoint and telling the broker about the step."""
    released = submit(broker, 2)
    broker.take(broker.begin(0, []), 2, 0)
    epoch = broker.begin(1, [released[1]])
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, ledger.outstanding, ledger.balanced) == (1, 1, 1, True)
    assert ids(broker.take(epoch, 10, 0)) == released[:1]
    assert broker.version() == 1


def test_settle_of_untrained_groups_counts_nothing(broker: Broker) -> None:
    released = submit(broker, 1)
    epoch = broker.begin(0, [])
    taken = broker.take(epoch, 1, 0)
    assert broker.settle(epoch, released) == 0
    broker.step(epoch, 1, taken)
    broker.expire(epoch, taken)  # trained: it may not go as expired any more
    assert broker.settle(epoch, released) == 1
    assert broker.settle(epoch, released) == 0
    assert (broker.ledger().expired, broker.ledger().settled, broker.queues().unsettled) == (0, 1, 0)


def test_fenced_take_leaves_what_it_read_for_the_newer_learner(broker: Broker) -> None:
    released = submit(broker, 6)
    old = broker.begin(0, [])
    new = broker.begin(0, [])
    for count in (2, 10):  # at the start of the stream, and after what the newer learner took
        with pytest.raises(FencedError, match="newer learner"):
            broker.take(old, count, 0)
        assert ids(broker.take(new, 2, 0)) == released[:2]
        released = released[2:]
    assert (broker.queues().groups_held, broker.queues().groups_waiting) == (4, 2)
    assert ids(broker.take(new, 10, 0)) == released


@pytest.mark.parametrize("executed", [True, False])
def test_take_whose_reply_is_lost_delivers_all_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    released = submit(broker, 6)
    epoch = broker.begin(0, [])
    taken = ids(broker.take(epoch, 2, 0))
    read, lost = broker._client.xreadgroup, iter([True])

    def losing(*arguments: Any, **options: Any) -> Any:
        if next(lost, False):
            if executed:
                read(*arguments, **options)
            raise redis.ConnectionError("lost")
        return read(*arguments, **options)

    monkeypatch.setattr(broker._client, "xreadgroup", losing)
    while some := ids(broker.take(epoch, 2, 5)):
        taken += some
    assert taken == released


def test_take_that_waits_is_fenced_as_soon_as_another_learner_begins(broker: Broker) -> None:
    old = broker.begin(0, [])
    caught: list[BaseException] = []

    def take() -> None:
        try:
            broker.take(old, 4, 5000)
        except FencedError as error:
            caught.append(error)

    reader = threading.Thread(target=take)
    reader.start()
    until(lambda: broker._client.info("clients")["blocked_clients"])
    started = time.monotonic()
    broker.begin(0, [])
    reader.join(5)
    assert caught and time.monotonic() - started < 2


def test_take_waits_until_a_group_is_submitted(broker: Broker) -> None:
    epoch = broker.begin(0, [])
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(ids(broker.take(epoch, 4, 5000))))
    reader.start()
    released = submit(broker, 1)
    reader.join(4)
    assert got == released


def test_finished_after_a_new_learner_begins_is_cleared(broker: Broker) -> None:
    assert not broker.finished()
    broker.finish()
    assert broker.finished()
    broker.begin(3, [])
    assert not broker.finished()
    assert broker.version() == 3


# -- a server that came back without what it had acknowledged


def test_step_after_lost_writes_is_refused_and_writes_nothing(broker: Broker) -> None:
    submit(broker, 3)
    epoch = broker.begin(0, [])
    first, second, third = broker.take(epoch, 3, 0)
    for version, groups in ((2, [first]), (1, [first, replace(second, entry_id="1-1")])):
        with pytest.raises(HeadraceError, match=f"LOST writes of learner epoch {epoch} before version {version}"):
            broker.step(epoch, version, groups)
    assert (broker.version(), broker.ledger().trained) == (0, 0)
    broker.step(epoch, 1, [first])
    with pytest.raises(HeadraceError, match="LOST"):  # delivered again, because the server forgot that it had been
        broker.step(epoch, 2, [first, third])
    assert (broker.version(), broker.ledger().trained) == (1, 1)


def test_submission_of_what_the_checkpoint_contains_is_settled_and_not_delivered(broker: Broker) -> None:
    """The server lost the submission and everything after it; the prompt is answered again, by another generator."""
    release(broker, 1)
    epoch = broker.begin(1, ["000000000"])
    again = lease(broker, 1)[0]
    assert broker.submit("g1", again, group(again.prompt.group_id))
    assert broker.submit("g1", again, group(again.prompt.group_id)), "sent twice"
    ledger = broker.ledger()
    assert (ledger.trained, ledger.settled, ledger.outstanding, ledger.balanced) == (1, 1, 0, True)
    assert broker.take(epoch, 4, 0) == []


def test_release_beyond_the_budget_is_refused_whoever_used_it_up(broker: Broker) -> None:
    """Between the feeder's look at the ledger and its release, a new learner took trained groups back."""
    submit(broker, 2)
    epoch = broker.begin(0, [])
    broker.step(epoch, 1, broker.take(epoch, 2, 0))
    assert broker.release([prompt(2)], 2, most_outstanding=2)
    broker.begin(0, [])
    assert not broker.release([prompt(3)], 3, most_outstanding=3)
    assert (broker.position(), broker.ledger().outstanding) == (3, 3)


def test_hold_of_a_replaced_learner_is_refused(broker: Broker) -> None:
    old = broker.begin(0, [])
    broker.hold(old)
    broker.begin(0, [])
    with pytest.raises(FencedError):
        broker.hold(old)


# -- sent twice


def test_every_write_sent_twice_counts_once(make_config: MakeConfig) -> None:
    broker = TwiceBroker.connect(make_config())
    broker.release([prompt(i) for i in range(6)], 0)  # the second copy answers False, and the position tells the truth
    assert broker.position() == 6
    leases = lease(broker, 6)
    for each in leases[:3]:
        assert broker.submit("g1", each, group(each.prompt.group_id))
    assert broker.filtered("g1", leases[3].entry_id, "correct")
    broker.give_back("g1", leases[4].entry_id, leases[4].prompt)
    broker.fail("g1", leases[5].entry_id, replace(leases[5].prompt, attempt=2), "bad")
    assert not broker.submit("g1", replace(leases[0], entry_id="1-1"), group("000000000"))
    assert broker.ledger().duplicates == 1

    epoch = broker.begin(0, [])
    taken = broker.take(epoch, 2, 0)
    assert ids(taken) == ["000000000", "000000001"]
    broker.step(epoch, 1, taken)
    assert broker.settle(epoch, ids(taken)) == 0  # the reply of the second copy
    broker.expire(epoch, broker.take(epoch, 2, 0))
    broker.announce({"type": "stop"})

    ledger = broker.ledger()
    assert ledger.balanced
    assert (ledger.released, ledger.rereleased) == (7, 1)
    assert (ledger.submitted, ledger.filtered_correct, ledger.dead) == (3, 1, 1)
    assert (ledger.trained, ledger.settled, ledger.expired) == (2, 2, 1)
    assert (ledger.duplicates, ledger.outstanding) == (1, 2)
    assert len(broker.controls("0", 0)) == 1


# -- foreign bytes


def test_take_of_foreign_bytes_dead_letters_and_goes_on(broker: Broker) -> None:
    stream = broker.keys.groups
    for fields in ({"p": b"\xff\x00 not msgpack"}, {"x": "y"}, {"g": "000000000", "p": wire.encode_group(group("7"))}):
        broker._client.xadd(stream, fields)
    submit(broker, 2)
    epoch = broker.begin(0, [])
    assert ids(broker.take(epoch, 10, 0)) == ["000000000", "000000001"]
    assert broker.queues().dead_letters == 3
    assert all(each.error for each in broker.dead_letters())
    # They were never released: the equation does not know them.
    assert broker.ledger().balanced
    assert broker.ledger().dead == 0


def test_take_of_a_damaged_group_counts_it_dead(broker: Broker) -> None:
    release(broker, 2)
    short, good = lease(broker, 2)
    assert broker.submit("g1", short, group(short.prompt.group_id, size=1))  # a group of 2 is configured
    assert broker.submit("g1", good, group(good.prompt.group_id))
    epoch = broker.begin(0, [])
    assert ids(broker.take(epoch, 10, 0)) == [good.prompt.group_id]
    assert (broker.ledger().dead, broker.ledger().balanced) == (1, True)
    assert "expected 2" in broker.dead_letters()[0].error


def test_lease_of_foreign_bytes_dead_letters_and_goes_on(broker: Broker) -> None:
    broker._client.xadd(broker.keys.prompts, {f"f{i}": b"\xc1" for i in range(5000)})
    release(broker, 1)
    assert [each.prompt.group_id for each in broker.lease("g1", 5, 0)] == ["000000000"]
    assert broker.queues().dead_letters == 1
    assert broker.ledger().balanced


# -- many at once, killed at random


def test_everything_killed_at_random_is_accounted_exactly_once(make_config: MakeConfig) -> None:
    config = make_config(broker={"lease_ttl_s": 0.02, "member_ttl_s": 60.0})
    total, done = 200, threading.Event()

    def generator(index: int) -> None:
        broker, rng, life = Broker.connect(config), random.Random(index), 0
        while not done.is_set():
            consumer = f"g{index}-{life}"
            for each in broker.lease(consumer, rng.randint(1, 4), 10):
                fate = rng.random()
                if fate < 0.15:  # killed with this lease, and the rest of the batch, in its hands
                    life += 1
                    break
                if fate < 0.3:
                    broker.filtered(consumer, each.entry_id, "wrong")
                elif fate < 0.4:
                    broker.give_back(consumer, each.entry_id, each.prompt)
                elif fate < 0.5:
                    broker.fail(consumer, each.entry_id, each.prompt, "data")
                else:
                    broker.submit(consumer, each, group(each.prompt.group_id))
        broker.close()

    def reclaimer() -> None:
        broker = Broker.connect(config)
        while not done.wait(0.005):
            broker.reclaim()
        broker.close()

    threads = [threading.Thread(target=generator, args=(index,)) for index in range(4)]
    threads.append(threading.Thread(target=reclaimer))
    for thread in threads:
        thread.start()
    try:
        durable = _learner_with_restarts(Broker.connect(config), total)
    finally:
        done.set()
        for thread in threads:
            thread.join()

    broker = Broker.connect(config)
    ledger = broker.ledger()
    assert ledger.balanced
    assert (ledger.released - ledger.rereleased, ledger.outstanding) == (total, 0)
    assert ledger.expired == ledger.rereleased > 0
    assert len(durable) == len(set(durable)) == ledger.trained == ledger.settled > total // 4
    assert len(broker._client.keys(broker.keys.prefix + "*")) <= 14  # nothing accumulates beside the known keys
    keys = broker.keys
    assert broker._client.exists(keys.arrived, keys.outstanding, keys.unsettled, keys.expiries) == 0


def _learner_with_restarts(broker: Broker, total: int) -> list[str]:
    """Trains until nothing is outstanding; returns the groups in its surviving weights."""
    rng, version = random.Random(99), 0
    durable: list[str] = []
    epoch, trained = broker.begin(0, []), list[str]()
    deadline = time.monotonic() + 60
    while broker.position() < total or broker.ledger().outstanding:
        assert time.monotonic() < deadline, f"stuck at {broker.ledger()}"
        if broker.position() < total and broker.ledger().outstanding < 20:
            release(broker, 10)
        taken, told = broker.take(epoch, 4, 10), True
        if taken and rng.random() < 0.1:  # too old
            broker.expire(epoch, taken)
        elif taken:
            version += 1
            trained += ids(taken)  # the optimizer step
            if told := rng.random() < 0.9:  # else killed before it could tell
                broker.step(epoch, version, taken)
        if rng.random() < 0.3:
            durable += trained  # the checkpoint is on disk
            trained_now, trained = trained, []
            if rng.random() < 0.7:
                broker.settle(epoch, trained_now)
        if not told or rng.random() < 0.1 or (taken and len(taken) < 2):
            epoch, trained = broker.begin(version, durable), []
        assert broker.ledger().balanced
    durable += trained
    broker.begin(version, durable)
    return durable


# -- members, messages, events


def test_members_silent_for_their_ttl_are_gone(make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(broker={"member_ttl_s": 0.05}))
    silent = Member("g1", "generator", "serving", version=3, epoch=2, host="h", pid=7, counters={"tokens": 5.0})
    broker.heartbeat(silent)
    broker.heartbeat(Member("learner", "learner", "serving"))
    (seen,) = broker.members("generator")
    assert replace(seen, age_s=0.0) == silent
    ended = threading.Event()
    timer = threading.Timer(0.06, ended.set)
    timer.start()
    ended.wait()
    broker.heartbeat(Member("learner", "learner", "serving"))
    assert [member.id for member in broker.members()] == ["learner"]
    broker.leave("learner")
    assert broker.members() == []


def test_controls_and_acks_arrive_in_order_after_a_position(broker: Broker) -> None:
    assert broker.last_control() == "0-0"
    first = broker.announce({"type": "form", "ranks": {"g1": 1}, "timeout_s": 1.5})
    second = broker.announce({"type": "commit", "version": 3, "v": "kept"})
    assert broker.controls("0", 0) == [
        (first, {"type": "form", "ranks": {"g1": 1}, "timeout_s": 1.5}),
        (second, {"type": "commit", "version": 3, "v": "kept"}),
    ]
    assert [each for each, _ in broker.controls(first, 0)] == [second] == [broker.last_control()]
    broker._client.xadd(broker.keys.control, {"n": "x", "p": b"\xc1"})
    assert [message for _, message in broker.controls(second, 0)] == [{"type": "unreadable"}]
    assert broker.acks("0", 1) == []
    assert broker.acknowledge({"stage": "loaded"}) == broker.last_ack()


def test_wait_event_when_budget_is_freed_wakes(broker: Broker) -> None:
    release(broker, 1)
    (each,) = lease(broker, 1)
    seen = broker.wait_event("0", 0)
    assert broker.wait_event(seen, 1) == seen
    woken: list[str] = []
    waiter = threading.Thread(target=lambda: woken.append(broker.wait_event(seen, 5000)))
    waiter.start()
    broker.filtered("g1", each.entry_id, "equal")
    waiter.join(4)
    assert woken and woken[0] != seen
    assert broker.wait_event(seen, 0) == woken[0]


# -- connecting


def test_connect_with_a_wrong_password_says_so(make_config: MakeConfig) -> None:
    config = make_config(broker={"password_file": None})
    with pytest.raises(ConfigError, match=r"password was refused.*broker\.password_file"):
        Broker.connect(config)


def test_connect_without_a_server_says_where(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"redis://127\.0\.0\.1:1.*no Redis or Valkey server answers"):
        Broker.connect(make_config(broker={"url": "redis://127.0.0.1:1"}))


def test_connect_with_nothing_configured_names_the_choices(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match=r"broker\.url is null.*headrace up"):
        Broker.connect(make_config(broker={"url": None, "password_file": None}))
