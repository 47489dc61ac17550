"""From the catalogue's definitions to what prometheus_client exposes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from common.catalogue import Metric

# Of a family: its value, or a value per label value.
Values = Mapping[str, float | Mapping[str, float]]


def families(metrics: Iterable[Metric], values: Values, run: str) -> Iterator[Family]:
    """The families of those metrics that have a value, labelled with the run's id; what is unknown is missing and not
    0."""
    for metric in metrics:
        if metric.name not in values:
            continue
        value = values[metric.name]
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.text, labels=("run", *metric.labels))
        if isinstance(value, Mapping):
            for label, each in value.items():
                family.add_metric([run, *label.split("/")], each)
        else:
            family.add_metric([run], value)
        yield family


def one_hot(state: str, states: Iterable[str]) -> dict[str, float]:
    """1 for the state, 0 for the others."""
    return {each: float(each == state) for each in states}
