"""The autoscaler: its formula and holds number by number, then whole fleets in simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from benchmarks.autoscale import TARGETS, WORKLOADS, Simulation, any_time, by_length, measure, ours
from broker.autoscale import TRIM_S, Autoscaler, Consumed, Observation, Produced, Wish
from broker.scaling import Pace
from common.config import AutoscaleConfig

BATCH, STEP_S, RATE = 64, 100.0, 0.08  # a fleet of 8 feeds this learner


@dataclass
class Fleet:
    """A run that goes on evenly: the learner trains step after step, each generator makes RATE groups a second."""

    scaler: Autoscaler
    generators: int = 8
    at: float = 0.0
    backlog: int = 96
    capacity: int = 256
    step_s: float = STEP_S
    starved: float = 0.0  # share of the time
    unblocked: float = 1.0
    learner: bool = True
    _groups: dict[str, tuple[float, float]] = field(default_factory=dict)
    _busy: float = 0.0
    _waited: float = 0.0
    _steps: float = 0.0

    def look(self, seconds: float = 15.0) -> Wish:
        """Let `seconds` pass and observe."""
        self.at += seconds
        self._busy += seconds * (1 - self.starved)
        self._waited += seconds * self.starved
        self._steps += seconds * (1 - self.starved) / self.step_s
        for number in range(self.generators):
            groups, unblocked = self._groups.get(f"g{number}", (0.0, 0.0))
            lasted = seconds * self.unblocked
            self._groups[f"g{number}"] = (groups + RATE * lasted, unblocked + lasted)
        made = {name: Produced(*self._groups[name]) for name in list(self._groups)[: self.generators]}
        consumed = Consumed(int(self._steps), self._busy, self._waited) if self.learner else None
        return self.scaler.observe(Observation(self.at, self.backlog, self.capacity, made, consumed))

    def go_on(self, seconds: float) -> Wish:
        for _ in range(int(seconds // 15)):
            wish = self.look()
        return wish


def fleet(headroom: float = 1.0, minimum: int = 1, maximum: int = 32, **options: float) -> Fleet:
    return Fleet(Autoscaler(AutoscaleConfig(min=minimum, max=maximum, headroom=headroom), BATCH, start=8), **options)  # type: ignore[arg-type]


# --- the formula


def test_base_is_what_the_learner_eats_over_what_a_generator_makes() -> None:
    wish = fleet().go_on(1500)
    assert wish.base == pytest.approx(BATCH / STEP_S / RATE, rel=0.05)
    assert wish.trim == 0  # the backlog is 1.5 batches


@pytest.mark.parametrize("headroom", [0.95, 1.05])
def test_headroom_scales_the_base(headroom: float) -> None:
    plain, scaled = fleet().go_on(1500).base, fleet(headroom).go_on(1500).base
    assert plain is not None and scaled is not None
    assert scaled / plain == pytest.approx(headroom)


@pytest.mark.parametrize("backlog", [0, 64, 128, 192])
def test_trim_brings_the_backlog_to_one_and_a_half_batches_in_twenty_minutes(backlog: int) -> None:
    wish = fleet(backlog=backlog).go_on(1500)
    assert wish.trim == pytest.approx((96 - backlog) / (RATE * TRIM_S), rel=1e-6)


def test_trim_is_a_quarter_of_the_base_at_most() -> None:
    far = fleet(backlog=2000, capacity=4000)
    wish = far.go_on(1500)
    assert wish.base is not None
    assert wish.trim == pytest.approx(-0.25 * wish.base)


def test_target_is_one_that_can_be_reached_where_fewer_than_three_batches_can_wait() -> None:
    wish = fleet(backlog=32, capacity=64).go_on(1500)
    assert wish.trim == pytest.approx(0.0)


def test_rate_is_that_of_unblocked_generators() -> None:
    half = fleet(unblocked=0.5).go_on(1500)
    assert half.base == pytest.approx(BATCH / STEP_S / RATE, rel=0.05)


def test_step_in_progress_counts_as_soon_as_it_is_longer_than_usual() -> None:
    slow = fleet()
    before = slow.go_on(1500).base
    slow.step_s = 1e9  # it hangs
    after = slow.go_on(400).base
    assert before is not None and after is not None
    assert after < 0.7 * before


# --- holds


def test_wish_is_held_while_fed_and_the_change_is_small() -> None:
    calm = fleet(generators=9)
    wish = calm.go_on(1500)
    assert (wish.held, wish.generators) == (True, 9)


@pytest.mark.parametrize(
    "change",
    [{"starved": 0.05}, {"backlog": 20}, {"backlog": 220}, {"generators": 12}],
    ids=["starved", "short", "long", "far off"],
)
def test_wish_moves_when_one_condition_of_the_hold_fails(change: dict[str, float]) -> None:
    assert not fleet(**change).go_on(1500).held


def test_hold_does_not_take_back_pods_that_were_asked_for_and_have_not_come_yet() -> None:
    loading = fleet(starved=0.3, generators=7)
    loading.go_on(1500)
    loading.starved = 0.0
    wish = loading.go_on(900)
    assert wish.held
    assert wish.generators in (8, 9)  # though only seven are there


# --- there always is a wish


def test_before_anything_is_known_the_wish_is_the_start_within_the_limits() -> None:
    assert fleet().scaler.wish.generators == 8
    assert Autoscaler(AutoscaleConfig(min=2, max=4), BATCH, start=0).wish.generators == 2
    assert Autoscaler(AutoscaleConfig(min=2, max=4), BATCH, start=9).wish.generators == 4
    assert fleet().look().generators == 8


def test_wish_stays_within_the_limits() -> None:
    assert fleet(starved=0.5, maximum=4).go_on(1500).generators == 4
    assert fleet(backlog=250, minimum=10).go_on(1500).generators == 10


def test_silence_changes_nothing_and_what_was_missed_is_averaged() -> None:
    run = fleet(generators=8)
    before = run.go_on(1500)
    after = run.look(600)
    assert after.generators == before.generators
    assert after.base == pytest.approx(before.base, rel=0.1)


def test_learner_that_is_gone_or_replaced_leaves_the_wish_alone() -> None:
    run = fleet()
    before = run.go_on(1500)
    run.learner = False
    assert run.go_on(600).generators == before.generators
    run.learner, run._busy, run._steps, run._waited = True, 0.0, 0.0, 0.0
    assert run.go_on(600).base == pytest.approx(before.base, rel=0.15)


def test_generators_that_restart_or_leave_do_not_count_as_idle() -> None:
    run = fleet()
    before = run.go_on(1500).base
    run._groups = {name: (0.0, 0.0) for name in run._groups}
    run.generators = 5
    assert run.look().base == pytest.approx(before, rel=0.1)


def test_observation_that_is_not_newer_is_ignored() -> None:
    run = fleet()
    before = run.go_on(1500)
    assert run.look(0.0) == before


@pytest.mark.parametrize(("minimum", "maximum", "headroom"), [(0, 4, 1.0), (5, 4, 1.0), (1, 4, 0.9), (1, 4, 1.2)])
def test_impossible_limits_are_refused(minimum: int, maximum: int, headroom: float) -> None:
    with pytest.raises(ValidationError):
        AutoscaleConfig(min=minimum, max=maximum, headroom=headroom)


# --- fleets

SEEDS = 20


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_learner_is_fed_and_generators_work(name: str) -> None:
    found = measure(WORKLOADS[name], ours, SEEDS)
    assert {each: found[each] for each in TARGETS if found[each] > TARGETS[each]} == {}


def test_ten_minutes_without_figures_do_no_harm() -> None:
    found = measure(WORKLOADS["speed"], ours, SEEDS, blind_from=any_time(6.0))
    assert {each: found[each] for each in TARGETS if found[each] > TARGETS[each]} == {}


def test_scaling_producers_by_their_queue_starves_the_learner() -> None:
    assert Simulation(WORKLOADS["speed"], by_length, seed=0).run().starved > 0.8


def test_pace_waits_up_a_minute_down_five_and_takes_a_quarter_in_two_minutes() -> None:
    up = Pace(1, 32)
    assert [up.step(at, 8, value) for at, value in ((0, 8), (15, 16), (60, 16), (76, 16))] == [8, 8, 8, 16]
    down = Pace(1, 32)
    down.step(0, 16, 16)
    assert [down.step(at, 16, 4) for at in (15, 300, 301)] == [16, 16, 12]
    assert [down.step(at, 12, 4) for at in (316, 420)] == [12, 12]
    assert down.step(421, 12, 4) == 9
