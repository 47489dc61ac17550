"""The learner's own families of `/metrics`, and what its probes answer: the last record, and what it does now."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from common import catalogue
from common.config import Config
from common.exposition import expose
from common.families import Values, families, one_hot
from common.health import Health
from learner.publisher import PublishTimings, WeightPublisher

Phase = Literal["loading", "waiting", "training", "publishing", "saving"]
PHASES: tuple[Phase, ...] = ("loading", "waiting", "training", "publishing", "saving")


class Exposed(Collector):
    """What a learner's node shows. A metric sink, too: `write` takes each step's record.

    Attributes:
        publisher: whose last delivery is shown; rank 0 has one.
        health: of this rank's process.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.publisher: WeightPublisher | None = None
        self._record: Mapping[str, float] = {}
        self._ages = Counter[str]()
        self._steps = 0
        self._saved = time.monotonic()
        self._phase: Phase = "loading"
        self._since = time.monotonic()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.health = Health(config.metrics.stalled_s)

    def __enter__(self) -> None:
        """Open the port if one is configured; one rank of a node does. ConfigError: it cannot be taken."""
        registry = CollectorRegistry()
        registry.register(self)
        self._close: Callable[[], None] = lambda: None
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._close = expose(self._config.metrics, self.health, registry)

    def __exit__(self, *_: object) -> None:
        self._close()

    def hunger(self) -> dict[str, float]:
        """What the autoscaler needs to know: steps made, seconds in them and around them, seconds without groups."""
        seconds = dict(self._seconds)
        seconds[self._phase] += time.monotonic() - self._since
        busy = sum(seconds[phase] for phase in ("training", "publishing", "saving"))
        return {"steps": float(self._steps), "step_s": busy, "starved_s": seconds["waiting"]}

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """The learner does this meanwhile; entering and leaving are progress."""
        before = self._phase
        self._to(phase)
        try:
            yield
        finally:
            self._to(before)

    def _to(self, phase: Phase) -> None:
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self.health.beat()

    def serving(self) -> None:
        """Everything is loaded; from now on the learner waits for batches unless it says otherwise."""
        self._to("waiting")
        self.health.ready_when(lambda: "")

    def saved(self) -> None:
        """A checkpoint or snapshot is durable."""
        self._saved = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._record = dict(values)
        self._steps += 1
        for key, share in values.items():
            age = key.removeprefix("staleness_")
            if age.isdigit():
                self._ages[age] += round(share * values["trained_tokens"])

    def close(self) -> None:
        """As a sink there is nothing to close."""

    def collect(self) -> Iterator[Family]:
        values: dict[str, float | Mapping[str, float]] = {
            "headrace_learner_phase": one_hot(self._phase, PHASES),
            "headrace_learner_steps_total": float(self._steps),
            "headrace_learner_trained_tokens_total": {age: float(count) for age, count in sorted(self._ages.items())},
            "headrace_checkpoint_age_seconds": time.monotonic() - self._saved,
            **_weights(self.publisher.timings if self.publisher is not None else None),
        }
        run = self._config.run.run_id
        yield from families(catalogue.LEARNER, values, run)
        yield from families(*_last(self._record), run)


def _weights(timings: PublishTimings | None) -> Values:
    if timings is None:
        return {}
    parts = {"stage": timings.stage_s, "form": timings.form_s, "send": timings.send_s, "load": timings.load_s,
             "pause": timings.pause_s}  # fmt: skip
    return {
        "headrace_weights_seconds": parts,
        "headrace_weights_members": float(timings.members),
        "headrace_weights_dropped": float(timings.dropped),
        "headrace_weights_bytes": float(timings.nbytes),
    }


def _last(record: Mapping[str, float]) -> tuple[list[catalogue.Metric], Values]:
    """The last step's record as gauges."""
    keys = {key: text for key, text in catalogue.explained().items() if key in record}
    metrics = [catalogue.Metric(catalogue.family(key), "gauge", text) for key, text in keys.items()]
    return metrics, {catalogue.family(key): record[key] for key in keys}
