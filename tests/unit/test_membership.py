"""Who gets the weights: a thousand random histories, and the decisions one by one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from membership_world import FLAWS, SLOTS, TIMEOUT_S, World, checksum_of

from common.weightcontrol import Ack, Commit, Form, Update
from common.weightwire import Parameter
from generator.standing import Standing
from learner.membership import Identity, Membership, Step

EVENTS = (
    *("join",) * 3, *("publish",) * 4, *("pass",) * 5, "die", "leave", "restart", "silent", "frozen", "wake", "wake",
    "breaks", "hangs", "names", *FLAWS,
)  # fmt: skip
HISTORY = st.lists(
    st.sampled_from([(kind, slot) for kind in EVENTS for slot in range(SLOTS)]), min_size=20, max_size=40
)


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(HISTORY)
def test_random_histories_nobody_lies_nobody_waits_and_everybody_is_served(history: list[tuple[str, int]]) -> None:
    world = World()
    for kind, slot in history:
        if world.despaired:  # the learner ends with an error
            return
        world.event(kind, slot)
        world.turn()
    world.settle()


# --- the decisions one by one


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def who(name: str, pid: int = 1) -> Identity:
    return name, "host", pid


def answer(machine: Membership, stage: str, *names: str, epoch: int | None = None, checksum: int | None = None) -> None:
    for name in names:
        group = machine.epoch if epoch is None else epoch
        machine.acknowledged(Ack(name, group, machine.version, stage, checksum=checksum))  # type: ignore[arg-type]


def until_commit(machine: Membership, *names: str) -> None:
    """From rest to where only "loaded" is missing."""
    step = machine.step()
    if step is Step.FORM:
        answer(machine, "formed", *names)
        assert machine.step() is Step.CONNECT
        machine.link_done()
        step = machine.step()
    assert step is Step.UPDATE
    answer(machine, "receiving", *names)
    assert machine.step() is Step.SEND
    machine.link_done()
    assert machine.step() is Step.COMMIT
    assert machine.step() is Step.WAIT


def formed_ahead(machine: Membership, *names: str) -> None:
    """From FORM to rest."""
    assert list(machine.members) == list(names)
    answer(machine, "formed", *names)
    assert machine.step() is Step.CONNECT
    machine.link_done()
    assert machine.step() is Step.REST


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def machine(clock: Clock) -> Membership:
    machine = Membership(TIMEOUT_S, clock, epoch=0)
    machine.look([who("a"), who("b")])
    assert machine.step() is Step.REST
    machine.publish(3, checksum_of(3))
    return machine


def test_same_members_keep_their_group_and_a_newcomer_is_served_alone(machine: Membership) -> None:
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", "b", checksum=checksum_of(3))
    assert (machine.step(), machine.step(), machine.complete) == (Step.LOADED, Step.REST, True)
    machine.publish(4, checksum_of(4))
    until_commit(machine, "a", "b")
    assert machine.epoch == 1
    answer(machine, "loaded", "a", "b", checksum=checksum_of(4))
    assert (machine.step(), machine.step()) == (Step.LOADED, Step.REST)
    machine.look([who("a"), who("b"), who("c")])
    until_commit(machine, "c")
    assert (machine.complete, list(machine.members)) == (True, ["c"])
    answer(machine, "loaded", "c", checksum=checksum_of(4))
    assert (machine.step(), machine.step()) == (Step.LOADED, Step.FORM)
    formed_ahead(machine, "a", "b", "c")
    machine.publish(5, checksum_of(5))
    assert machine.step() is Step.UPDATE  # nobody waits for a group to form


def test_group_formed_ahead_gives_way_to_a_version_and_is_tried_once_for_the_same_members(machine: Membership) -> None:
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", "b", checksum=checksum_of(3))
    assert (machine.step(), machine.step()) == (Step.LOADED, Step.REST)
    machine.look([who("a")])
    assert (machine.step(), list(machine.members)) == (Step.FORM, ["a"])
    machine.next_waits = True
    assert (machine.step(), machine.reason, machine.step()) == (Step.DISBAND, "a newer version waits", Step.REST)
    machine.next_waits = False
    assert machine.step() is Step.REST


def test_member_restarted_under_its_name_holds_nothing(machine: Membership) -> None:
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", "b", checksum=checksum_of(3))
    assert (machine.step(), machine.step()) == (Step.LOADED, Step.REST)
    machine.look([who("a"), who("b", pid=2)])
    assert (machine.step(), machine.members) == (Step.FORM, {"b": who("b", pid=2)})


def test_answer_to_an_earlier_group_counts_for_nothing(machine: Membership) -> None:
    until_commit(machine, "a", "b")
    machine.look([who("a"), who("b", pid=2)])
    assert (machine.step(), machine.reason) == (Step.DISBAND, "b went away during 'commit'")
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", "b", epoch=1, checksum=checksum_of(3))
    answer(machine, "failed", "a", epoch=1)
    assert machine.step() is Step.WAIT


def test_member_that_had_loaded_dies_the_others_are_not_disturbed(machine: Membership) -> None:
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "b", checksum=checksum_of(3))
    machine.look([who("a")])
    assert machine.step() is Step.WAIT
    answer(machine, "loaded", "a", checksum=checksum_of(3))
    assert machine.step() is Step.LOADED


def test_damaged_weights_are_sent_again_at_once_and_the_member_is_left_out_if_it_repeats(
    machine: Membership, clock: Clock
) -> None:
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", checksum=checksum_of(3))
    answer(machine, "corrupt", "b", checksum=7)
    assert machine.step() is Step.DISBAND
    until_commit(machine, "b")
    answer(machine, "loaded", "b", checksum=7)  # or says that it loaded them
    assert (machine.step(), machine.step(), machine.complete) == (Step.DISBAND, Step.FORM, True)
    formed_ahead(machine, "a")
    clock.now += 2 * TIMEOUT_S
    assert (machine.step(), list(machine.members)) == (Step.FORM, ["b"])


def test_silent_member_is_left_out_longer_each_time(machine: Membership, clock: Clock) -> None:
    waits = []
    until_commit(machine, "a", "b")
    answer(machine, "loaded", "a", checksum=checksum_of(3))
    for attempt in range(3):
        clock.now += TIMEOUT_S + 0.1
        assert machine.step() is Step.DISBAND
        if not attempt:
            assert machine.step() is Step.FORM
            formed_ahead(machine, "a")
        left_at = clock.now
        while machine.step() is Step.REST:
            clock.now += 0.5
        waits.append(clock.now - left_at)
    assert waits == pytest.approx([2 * TIMEOUT_S, 4 * TIMEOUT_S, 8 * TIMEOUT_S])


def test_nobody_was_ever_reached_despairs(machine: Membership, clock: Clock) -> None:
    assert machine.step() is Step.FORM
    clock.now += TIMEOUT_S + 0.1
    assert (machine.step(), machine.step()) == (Step.DISBAND, Step.DESPAIR)
    assert machine.reason == "'form': no answer from a, b within 4 s"


def test_generator_of_another_group_sees_a_newer_version_go_out_and_takes_no_prompts() -> None:
    standing = Standing("a")
    standing.follow()
    ours = Form(1, "gloo", "host", 1, 2, {"a": 1}, 1, TIMEOUT_S)
    update = Update(1, 3, (Parameter("w", "float32", (1,)),))
    assert standing.formed(ours) and standing.announced(update) and standing.committed(Commit(1, 3))
    standing.loaded()
    assert (standing.state, standing.version) == ("serving", 3)
    assert not standing.formed(Form(2, "gloo", "host", 1, 2, {"b": 1}, 1, TIMEOUT_S))
    assert not standing.committed(Commit(2, 3)) and standing.state == "serving"  # a newcomer got the same
    assert not standing.committed(Commit(2, 4))
    assert (standing.state, standing.version) == ("syncing", 3)
    standing.drain()
    assert not standing.formed(Form(3, "gloo", "host", 1, 2, {"a": 1}, 1, TIMEOUT_S)) and standing.state == "draining"
