"""The generator's own families of `/metrics`, and what its probes answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from broker import Member
from common import catalogue
from common.config import Config
from common.exposition import expose
from common.families import Values, families, one_hot
from common.health import Health
from generator.rewards import FailureKind

_STATES = ("joining", "syncing", "serving", "draining")
_COUNTED = ("tokens", "requests", "groups", "filtered", "duplicates")
_SECONDS = ("busy", "paused", "blocked", "broker_full")
_MOVES = (*_COUNTED, "failures", "updates", "blocked_s", "broker_full_s")


class Exposed(Collector):
    """What a generator shows.

    Args:
        config: the run.
        member: describes the generator, as its heartbeat does.
        update_seconds: parts of its last weight update.

    Attributes:
        failed: prompts that failed here, by kind.
        vllm: where vLLM registers its own families; None: nowhere yet.
    """

    def __init__(
        self, config: Config, member: Callable[[], Member], update_seconds: Callable[[], Mapping[str, float]]
    ) -> None:
        self._config, self._member, self._update_seconds = config, member, update_seconds
        self._bound = config.staleness.sampling_lag
        self._learner_version, self._seen = 0, -1.0
        self.failed = Counter[FailureKind]()
        self.vllm: CollectorRegistry | None = None
        self.health = Health(config.metrics.stalled_s)
        self.health.ready_when(self._unready)

    def open(self) -> Callable[[], None]:
        """Open the port if one is configured; what it returns closes it. ConfigError: it cannot be taken."""
        if self._config.metrics.port is None:
            return lambda: None
        # vLLM registers its own families with the library's default registry.
        from prometheus_client import REGISTRY

        REGISTRY.register(self)
        self.vllm = REGISTRY
        close = expose(self._config.metrics, self.health, REGISTRY)

        def end() -> None:
            close()
            REGISTRY.unregister(self)

        return end

    def beat(self, learner_version: int) -> None:
        """To be called with every heartbeat once the engine runs: idle, or something has come out since the last."""
        self._learner_version = learner_version
        counters = self._member().counters
        moved = sum(counters.get(name, 0.0) for name in _MOVES)
        if moved != self._seen or not counters.get("in_flight"):
            self._seen = moved
            self.health.beat()

    def _unready(self) -> str:
        member = self._member()
        if member.state != "serving":
            return member.state
        if member.version < self._learner_version - self._bound:
            return f"its weights are of version {member.version}, the learner is at {self._learner_version}"
        return ""

    def collect(self) -> Iterator[Family]:
        member = self._member()
        counters = member.counters
        values: dict[str, float | Mapping[str, float]] = {
            "headrace_generator_state": one_hot(member.state, _STATES),
            "headrace_generator_version": float(member.version),
            "headrace_generator_weight_epoch": float(member.epoch),
            "headrace_generator_prompts_in_flight": counters.get("in_flight", 0.0),
            "headrace_generator_update_seconds": dict(self._update_seconds()),
            "headrace_generator_updates_total": counters.get("updates", 0.0),
            **({} if self.vllm is None else _vllm(self.vllm)),
            **{f"headrace_generator_{name}_total": counters.get(name, 0.0) for name in _COUNTED},
            "headrace_generator_failures_total": {kind: float(self.failed[kind]) for kind in get_args(FailureKind)},
            **{f"headrace_generator_{name}_seconds_total": counters.get(f"{name}_s", 0.0) for name in _SECONDS},
        }
        yield from families(catalogue.GENERATOR, values, self._config.run.run_id)


def _vllm(registry: CollectorRegistry) -> Values:
    """What vLLM's own families say, under our names and with the run's id; nothing before its engine is up."""
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    # Restricted: collecting everything would collect us again.
    found = {f.name: f.samples[0].value for f in registry.restricted_registry(names).collect() if f.samples}
    if len(found) < len(names):
        return {}
    cache, running, waiting = (found[name] for name in names)
    return {
        "headrace_generator_kv_cache_ratio": cache,
        "headrace_generator_sequences": {"running": running, "waiting": waiting},
    }
