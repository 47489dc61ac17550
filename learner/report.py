"""The learner's metrics: one flat record a step, to the sinks and as one console line. Keys are explained in
`docs/metrics.md`."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from broker import Broker, Ledger, Member
from common.config import Config
from common.log import Logger
from common.metrics import MetricSink
from learner.batch import Counts, Step
from learner.collector import Batch
from learner.trainer import UpdateResult

_LINE = (
    "step %d: reward %.3f accuracy %.3f sampled %.3f | %d tokens, staleness %.2f (max %d), entropy %.3f, weight %.3f, "
    "clipped %.3f, grad %.3f | wait %.1f s, train %.1f s, generators busy %.0f %%"
)
# Averaged over the updates of a batch; the rest of `Metrics` is either a count or a maximum.
_PEAKS = {"weight_max", "importance_max"}
# Mean |p_learner - p_sampler| of the sampled tokens, both with the same weights.
_HEALTHY_GAP, _BROKEN_GAP = 0.005, 0.01
_USUAL_CAUSES = (
    "another temperature, or logits that are not float32, on one side; sampling that renormalises (top_p, top_k, "
    "penalties); log-probabilities taken before temperature; another dtype or tokenizer; weights that did not arrive"
)


class Reporter:
    """Turns what rank 0 knows about a step into a record."""

    def __init__(
        self,
        config: Config,
        broker: Broker,
        sinks: Sequence[MetricSink],
        log: Logger,
        counters: Mapping[str, float] | None = None,
    ) -> None:
        """`counters`: as a checkpoint holds them, to go on from."""
        self._config, self._broker, self._sinks, self._log = config, broker, sinks, log
        counters = counters or {}
        self._last = time.time()
        self._started = self._last - counters.get("time_s", 0.0)
        self._ledger = broker.ledger()
        self._members: dict[str, Member] = {}
        self._train_windows: deque[tuple[float, float]] = deque(maxlen=64)
        self._probed = self._said_uninformative = False
        self._nonfinite = int(counters.get("nonfinite", 0))

    def counters(self) -> dict[str, float]:
        """What goes on in a resumed run: seconds of training so far, updates left out and not recorded yet."""
        return {"time_s": time.time() - self._started, "nonfinite": float(self._nonfinite)}

    def waiting(self) -> None:
        """While no batch fills: say, once per batch, that dynamic sampling lets too little through."""
        filtered = _filtered(self._broker.ledger()) - _filtered(self._ledger)
        wanted = self._config.learner.groups_per_step
        if self._said_uninformative or filtered < self._config.sampling.max_generation_factor * wanted:
            return
        self._said_uninformative = True
        self._log.warning(
            "%d groups were all right or all wrong and the next batch of %d is not full yet "
            "(sampling.max_generation_factor %d): the prompts are too easy or too hard for this model; going on",
            filtered, wanted, self._config.sampling.max_generation_factor,
        )  # fmt: skip

    def updates(self, results: Sequence[UpdateResult]) -> None:
        """Count the updates of a batch that were left out; the next record shows them."""
        self._nonfinite += sum(r.nonfinite + (r.critic is not None and r.critic.nonfinite) for r in results)

    def step(
        self,
        version: int,
        batch: Batch,
        steps: Sequence[Step],
        results: Sequence[UpdateResult],
        train_started: float,
        publish_s: float,
        used: Mapping[str, float],
    ) -> None:
        """Record the step that made `version`; `used`: how well the ranks' time was (`learner.utilisation`)."""
        self.waiting()
        self._said_uninformative = False
        if not self._probed:
            self._probe(steps, results)
        now = time.time()
        record = {
            "version": float(version),
            "time_s": now - self._started,
            "ranks": float(os.environ.get("WORLD_SIZE", 1)),
            **self._times(batch, results, now, publish_s),
            **used,
            **_counts(sum((step.counts for step in steps), Counts())),
            **_objective([result for result in results if not result.nonfinite]),
            **_critic(results),
            "nonfinite": float(self._nonfinite),
            **self._flow(),
            **self._generators(),
            "overlapped_groups": float(self._overlapped(batch)),
        }
        record["sampled_accuracy"] = _sampled_accuracy(record)
        record["generation_factor"] = _generation_factor(record)
        self._train_windows.append((train_started, train_started + record["train_s"]))
        self._last, self._nonfinite = now, 0
        for sink in self._sinks:
            sink.write(version, record)
        self._log.info(
            _LINE, version, record["reward_mean"], record["raw_accuracy"], record["sampled_accuracy"], record["tokens"],
            record["staleness_mean"], record["staleness_max"], record["entropy"], record["weight_mean"],
            record["clip_above"] + record["clip_below"] + record["clip_dual"], record["grad_norm"], record["wait_s"],
            record["train_s"], 100 * record["generator_busy_share"],
        )  # fmt: skip

    def _probe(self, steps: Sequence[Step], results: Sequence[UpdateResult]) -> None:
        """On the first batch that the learner's own weights sampled, do sampler and learner agree? Its first update is
        measured before any weight has moved."""
        if any(step.counts.staleness_max for step in steps) or not results[0].metrics.tokens:
            return
        self._probed = True
        gap = results[0].metrics.probability_gap
        text = "start-up probe: mean |p_learner - p_sampler| is %.2g over %d tokens"
        if gap <= _HEALTHY_GAP:
            self._log.info(text + " (healthy)", gap, results[0].metrics.tokens)
            return
        verdict = "broken" if gap > _BROKEN_GAP else "doubtful"
        self._log.warning(
            text + ", %s: below %g is healthy, above %g importance weights mean nothing; usual causes: %s",
            gap, results[0].metrics.tokens, verdict, _HEALTHY_GAP, _BROKEN_GAP, _USUAL_CAUSES,
        )  # fmt: skip

    def _times(
        self, batch: Batch, results: Sequence[UpdateResult], now: float, publish_s: float
    ) -> dict[str, float]:
        step_s = max(now - self._last, 1e-9)
        return {
            "step_s": step_s,
            "wait_s": batch.wait_s,
            "train_s": sum(result.seconds for result in results),
            "publish_s": publish_s,
            "learner_wait_share": min(batch.wait_s / step_s, 1.0),
            "tokens_per_s": sum(delivery.group.response_tokens for delivery in batch.deliveries) / step_s,
        }

    def _overlapped(self, batch: Batch) -> int:
        """Groups of the batch whose sampling ended while an optimizer step ran: proof that generation goes on."""
        return sum(
            any(begin <= delivery.group.sampled_at <= end for begin, end in self._train_windows)
            for delivery in batch.deliveries
        )

    def _flow(self) -> dict[str, float]:
        """What the ledger counted since the last step."""
        ledger, before = self._broker.ledger(), self._ledger
        self._ledger = ledger
        return {
            "filtered_correct": float(ledger.filtered_correct - before.filtered_correct),
            "filtered_wrong": float(ledger.filtered_wrong - before.filtered_wrong),
            "filtered_equal": float(ledger.filtered_equal - before.filtered_equal),
            "expired": float(ledger.expired - before.expired),
            "dead": float(ledger.dead - before.dead),
            "duplicates": float(ledger.duplicates - before.duplicates),
            "outstanding": float(ledger.outstanding),
        }

    def _generators(self) -> dict[str, float]:
        """Shares of the time since the last step, averaged over living generators."""
        members = {member.incarnation: member for member in self._broker.members("generator")}
        busy, blocked, tokens, wall = 0.0, 0.0, 0.0, 0.0
        for member in members.values():
            before = self._members.get(member.incarnation)
            delta = {
                name: value - (before.counters.get(name, 0.0) if before else 0.0)
                for name, value in member.counters.items()
            }
            busy += delta.get("busy_s", 0.0)
            blocked += delta.get("blocked_s", 0.0)
            tokens += delta.get("tokens", 0.0)
            wall += delta.get("wall_s", 0.0)
        self._members = members
        return {
            "generators": float(len(members)),
            # Counters of a heartbeat are read one after the other: over a short step a share may exceed 1 by a hair.
            "generator_busy_share": min(busy / wall, 1.0) if wall else 0.0,
            "generator_blocked_share": min(blocked / wall, 1.0) if wall else 0.0,
            "sampled_tokens_per_s": tokens / wall * len(members) if wall else 0.0,
        }


def _counts(counts: Counts) -> dict[str, float]:
    responses = max(counts.responses, 1)
    return {
        "groups": float(counts.groups),
        "zero_advantage_share": counts.flat_groups / max(counts.groups, 1),
        "responses": float(counts.responses),
        "tokens": float(counts.tokens),
        "reward_mean": counts.reward / responses,
        "raw_reward_mean": counts.raw_reward / responses,
        "raw_accuracy": counts.correct / max(counts.judged, 1),
        "response_length_mean": counts.tokens / responses,
        "response_length_max": float(counts.longest),
        "truncated_share": counts.truncated / responses,
        "expired_tokens": float(counts.expired_tokens),
        "overlong_filtered_tokens": float(counts.filtered_tokens),
        "staleness_mean": counts.staleness_mean,
        "staleness_max": float(counts.staleness_max),
        **{f"staleness_{age}": tokens / max(counts.trained_tokens, 1) for age, tokens in counts.staleness},
    }


def _sampled_accuracy(record: Mapping[str, float]) -> float:
    """Accuracy over all groups that were sampled since the last step: the batch's mixed ones at what they scored, those
    that dynamic sampling filtered at 1 or 0. Without it the accuracy of trained groups would hide the learning."""
    correct = record["filtered_correct"] + record["raw_accuracy"] * record["groups"]
    return correct / max(record["filtered_correct"] + record["filtered_wrong"] + record["groups"], 1.0)


def _filtered(ledger: Ledger) -> int:
    return ledger.filtered_correct + ledger.filtered_wrong + ledger.filtered_equal


def _generation_factor(record: Mapping[str, float]) -> float:
    """Groups sampled for every group trained."""
    filtered = record["filtered_correct"] + record["filtered_wrong"] + record["filtered_equal"]
    return (filtered + record["groups"]) / max(record["groups"], 1.0)


def _objective(results: Sequence[UpdateResult]) -> dict[str, float]:
    records = [asdict(result.metrics) for result in results]
    merged = {
        name: max(record[name] for record in records)
        if name in _PEAKS
        else sum(record[name] for record in records) / len(records)
        for name in records[0]
        if name != "tokens"
    }
    return {
        **{name: float(value) for name, value in merged.items()},
        "trained_tokens": float(sum(record["tokens"] for record in records)),
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "learning_rate": results[-1].lr,
        "updates": float(len(results)),
    }


def _critic(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Averages over the critic's updates that were made; nothing without a critic."""
    records = [asdict(r.critic) for r in results if r.critic is not None and not r.critic.nonfinite]
    return {
        name: sum(record[name] for record in records) / len(records)
        for name in (records[0] if records else ())
        if name != "nonfinite"
    }
