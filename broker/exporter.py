"""The run's own families of `/metrics`, from the broker service's latest reading."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from broker.reading import Reading
from common import catalogue
from common.config import Config
from common.families import Values, families


class RunCollector(Collector):
    """Serves what the last reading says; nothing of it once that is older than `metrics.stalled_s` or a minute.

    Args:
        config: the run.
        latest: the last reading; None before the first.
        wish: generators that are wanted.
    """

    def __init__(self, config: Config, latest: Callable[[], Reading | None], wish: Callable[[], int]) -> None:
        self._config, self._latest, self._wish = config, latest, wish
        self._oldest_s = min(60.0, config.metrics.stalled_s)

    def collect(self) -> Iterator[Family]:
        reading = self._latest()
        fresh = reading is not None and time.monotonic() - reading.at <= self._oldest_s
        values: dict[str, float | Mapping[str, float]] = {
            "headrace_generators_desired": float(self._wish()),
        }
        if reading is not None:  # before the first nobody has asked the server
            values["headrace_scrape_errors"] = float(not fresh)
        if reading is not None and fresh:
            values.update(run_values(reading, self._config))
        yield from families(catalogue.RUN, values, self._config.run.run_id)


def run_values(reading: Reading, config: Config) -> Values:
    """Value of every family in `catalogue.RUN` but the scrape's own."""
    ledger, queues, unfinished = reading.ledger, reading.queues, reading.unfinished
    held = Counter(f"{member.role}/{member.state}" for member in reading.members)
    generators = reading.in_role("generator")
    return {
        "headrace_policy_version": float(reading.version),
        "headrace_prompts_released_total": float(ledger.released),
        "headrace_prompts_rereleased_total": float(ledger.rereleased),
        "headrace_groups_submitted_total": float(ledger.submitted),
        "headrace_groups_filtered_total": {
            "correct": float(ledger.filtered_correct),
            "wrong": float(ledger.filtered_wrong),
            "equal": float(ledger.filtered_equal),
        },
        "headrace_groups_trained_total": float(ledger.trained),
        "headrace_groups_settled_total": float(ledger.settled),
        "headrace_groups_expired_total": float(ledger.expired),
        "headrace_groups_dead": float(ledger.dead),
        "headrace_dead_letters": float(queues.dead_letters),
        "headrace_late_results_total": float(ledger.duplicates),
        "headrace_conservation_error": float(ledger.released - ledger.accounted),
        "headrace_groups_outstanding": {
            "prompt_waiting": float(queues.prompts_waiting),
            "prompt_leased": float(queues.prompts_leased),
            "group_waiting": float(queues.groups_waiting),
            "group_held": float(queues.groups_held),
        },
        "headrace_groups_unsettled": float(queues.unsettled),
        "headrace_outstanding_limit": float(config.max_outstanding),
        "headrace_staleness_limit": float(config.staleness.max_staleness),
        "headrace_lag_groups": float(queues.groups_waiting),
        "headrace_lag_steps": queues.groups_waiting / config.learner.groups_per_step,
        "headrace_oldest_group_age_seconds": unfinished.outstanding.age_s if unfinished.outstanding else 0.0,
        "headrace_queue_bytes": float(reading.queue_bytes),
        "headrace_redis_memory_bytes": float(reading.memory),
        "headrace_redis_memory_limit_bytes": float(reading.memory_limit),
        "headrace_members": {name: float(count) for name, count in sorted(held.items())},
        "headrace_generators_behind": float(
            sum(member.state == "serving" and member.version < reading.version for member in generators)
        ),
    }
