"""What the learner's reporter says to the operator, on a real server."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from broker_helpers import lease, release

from broker import Broker
from common.log import Logger
from learner.batch import Counts, Step, build_step
from learner.collector import Batch
from learner.objective_metrics import Metrics, MetricSums
from learner.report import Reporter
from learner.trainer import UpdateResult


class ListSink:
    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def write(self, step: int, values: dict[str, float]) -> None:
        self.records.append(values)

    def close(self) -> None: ...


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def reporter(broker: Broker, sink: ListSink) -> Reporter:
    return Reporter(broker.config, broker, [sink], Logger("test", "reporter"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def filter_groups(broker: Broker, count: int) -> None:
    release(broker, count)
    for each in lease(broker, count):
        broker.filtered("g1", each.entry_id, "correct")


def step(reporter: Reporter, gap: float = 0.0, staleness: tuple[tuple[int, int], ...] = ((0, 8),)) -> None:
    """Report a step whose batch has no groups but the given ages."""
    counts = Counts(groups=4, staleness=staleness, trained_tokens=8)
    empty: Step = build_step([], reporter._config, 0)
    metrics: Metrics = replace(MetricSums.zero().finish(2.0), tokens=8, probability_gap=gap)
    result = UpdateResult(metrics, grad_norm=1.0, lr=1e-3, seconds=0.1)
    reporter.step(1, Batch((), 0.0), [replace(empty, counts=counts)], [result], 0.0, 0.0, {"padding_share": 0.25})


def test_waiting_too_many_filtered_groups_said_once_a_batch(
    reporter: Reporter, broker: Broker, sink: ListSink, caplog: pytest.LogCaptureFixture
) -> None:
    factor, wanted = broker.config.sampling.max_generation_factor, broker.config.learner.groups_per_step
    filter_groups(broker, factor * wanted - 1)
    reporter.waiting()
    assert warnings(caplog) == []
    filter_groups(broker, 1)
    reporter.waiting()
    reporter.waiting()
    assert len(warnings(caplog)) == 1 and "too easy or too hard" in warnings(caplog)[0]
    step(reporter)
    assert sink.records[0]["generation_factor"] == factor + 1
    filter_groups(broker, factor * wanted)
    reporter.waiting()
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("gap, verdict", [(0.004, None), (0.007, "doubtful"), (0.02, "broken")])
def test_probe_of_the_first_fresh_batch_judges_the_gap(
    reporter: Reporter, caplog: pytest.LogCaptureFixture, gap: float, verdict: str | None
) -> None:
    step(reporter, gap=0.5, staleness=((1, 8),))
    assert warnings(caplog) == [], "tokens of older weights say nothing about the two implementations"
    step(reporter, gap=gap)
    step(reporter, gap=0.5)
    assert len(warnings(caplog)) == (verdict is not None), "only the first fresh batch is the probe"
    if verdict is not None:
        assert verdict in warnings(caplog)[0] and "temperature" in warnings(caplog)[0]
