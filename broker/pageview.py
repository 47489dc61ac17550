"""What the live page shows of a run, made from the broker service's readings and the learner's records.

Promise: of bounded size however long the run is: curves are thinned to `POINTS` points, events and answers are the
newest few. Everything is data; what a model or a data set wrote is escaped by the page, not here.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from broker.progress import MetricsTail
from broker.reading import Reading, stations
from broker.records import DeadLetter, Ledger, Member
from common.config import Config
from common.trajectory import Group, Prompt, Response

POINTS = 500
GROUPS = 4  # whose answers are shown, and of each as many of the best and the worst
_ENDS = 2
_TEXT = 1500  # characters of a text
_EVENTS = 60
_SILENCE_S = 5.0
_RATE_S = 15.0
_REPEAT_S = 600.0

# Of a record; the first is what the points are in order of.
RECORD_KEYS = (
    "version", "time_s", "reward_mean", "sampled_accuracy", "response_length_mean", "response_length_max",
    "truncated_share", "entropy", "probability", "clip_above", "clip_below", "clip_dual", "weight_mean",
    "weight_at_cap", "masked_share", "effective_sample_size", "probability_gap", "staleness_mean", "staleness_max",
    "tokens_per_s", "sampled_tokens_per_s", "learner_wait_share", "generator_busy_share", "generator_blocked_share",
    "zero_advantage_share", "grad_norm",
)  # fmt: skip
FLOW_KEYS = ("at", "waiting", "in_flight", "queued", "learner", "lag_steps", "tokens_per_s")


class Curves:
    """Points of several curves, thinned by averaging neighbours (of a key that ends with `_max`: their maximum).

    Args:
        keys: of the values; the first orders the points.
        limit: of points, even.
    """

    def __init__(self, keys: Sequence[str], limit: int = POINTS) -> None:
        self.keys, self._limit = tuple(keys), limit
        self._rows: list[list[float | None]] = []
        self._every, self._in_last = 1, 1  # values in a point, and in the newest one

    def add(self, values: Mapping[str, Any]) -> None:
        row = [_number(values.get(key)) for key in self.keys]
        if row[0] is None:
            return
        if (kept := self._before(row[0])) < len(self._rows):
            del self._rows[kept:]  # a learner that resumed makes these versions again
            self._in_last = self._every
        if self._rows and self._in_last < self._every:
            self._rows[-1] = self._merged(self._rows[-1], row, self._in_last)
            self._in_last += 1
            return
        if len(self._rows) >= self._limit:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [self._merged(first, second, 1) for first, second in pairs]
            self._every *= 2
        self._rows.append(row)
        self._in_last = 1

    def columns(self) -> dict[str, list[float | None]]:
        """Key -> value at every point, None where it is not known."""
        return {key: [row[i] for row in self._rows] for i, key in enumerate(self.keys)}

    def _before(self, first: float) -> int:
        """How many points lie before `first`."""
        count = len(self._rows)
        while count and (self._rows[count - 1][0] or 0.0) >= first:
            count -= 1
        return count

    def _merged(self, old: list[float | None], new: list[float | None], weight: int) -> list[float | None]:
        merged: list[float | None] = [new[0]]
        for key, a, b in zip(self.keys[1:], old[1:], new[1:], strict=True):
            if a is None or b is None:
                merged.append(b if a is None else a)
            else:
                merged.append(max(a, b) if key.endswith("_max") else (a * weight + b) / (weight + 1))
        return merged


class View:
    """The page's numbers. One thread calls `look`, `keep` and `say`; `history` and `samples` may be called by any.

    Args:
        config: the run.
        decode: token ids to text.
    """

    def __init__(self, config: Config, decode: Callable[[Sequence[int]], str]) -> None:
        self._config, self._decode = config, decode
        self._tail = MetricsTail(config.run.folder / "metrics.jsonl", from_start=True)
        self._records, self._flow = Curves(RECORD_KEYS), Curves(FLOW_KEYS)
        self._record: dict[str, Any] = {}
        self._last: Reading | None = None
        self._counted: dict[str, deque[tuple[float, float]]] = {}  # of a process: (wall_s, tokens), lately
        self._ledgers: deque[tuple[float, Ledger]] = deque()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._error, self._error_at = "", -math.inf  # the last one, and when it was said
        self._groups: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def look(self, reading: Reading, letters: Callable[[int], list[DeadLetter]], finished: bool = False) -> bytes:
        """The snapshot of `reading`, as JSON. `letters` gives the newest dead letters, up to so many."""
        with self._lock:
            self._read_records()
            self._compare(self._last, reading, letters)
            generators = reading.in_role("generator")
            self._counted = {m.incarnation: self._count(m) for m in generators}
            snapshot = self._snapshot(reading, finished)
            self._flow.add({**snapshot["stations"], **snapshot})
            self._last = reading
        return _json(snapshot)

    def history(self) -> bytes:
        """All curves, as JSON."""
        with self._lock:
            return _json({"records": self._records.columns(), "flow": self._flow.columns()})

    def samples(self) -> bytes:
        """The newest groups that `keep` was given, the newest first, as JSON."""
        with self._lock:
            return _json({"groups": list(self._groups.values())[::-1]})

    def keep(self, groups: Iterable[tuple[str, Prompt, Group]]) -> None:
        """Show these, newest first, before those that are shown."""
        new = {entry: self._group(prompt, group) for entry, prompt, group in groups if entry not in self._groups}
        with self._lock:
            shown = sorted({**self._groups, **new}.items(), key=lambda item: [int(n) for n in item[0].split("-")])
            self._groups = dict(shown[-GROUPS:])

    def say(self, kind: str, text: str) -> bool:
        """Add an event; versions that follow each other are one, an error that goes on is not said again. Returns
        whether it is a new one."""
        newest = self._events[-1] if self._events else None
        if newest is not None and newest["kind"] == kind == "version":
            newest.update(at=time.time(), text=f"{newest['text'].split(' to ')[0]} to {text.split()[-1]}")
            return False
        if kind == "error":
            now = time.monotonic()
            if text == self._error and now - self._error_at < _REPEAT_S:
                return False
            self._error, self._error_at = text, now
        self._events.append({"at": time.time(), "kind": kind, "text": text})
        return True

    def _read_records(self) -> None:
        try:
            for record in self._tail.read():
                self._record = record
                self._records.add(record)
        except (OSError, ValueError) as error:  # of the learner's, on a disk that may be another machine's
            self.say("error", f"metrics.jsonl cannot be read: {error}")

    def _compare(self, before: Reading | None, now: Reading, letters: Callable[[int], list[DeadLetter]]) -> None:
        """Say what has happened since `before`."""
        if before is None:
            self.say("service", f"the page opens at version {now.version}")
            return
        if (silent := now.at - before.at) > max(_SILENCE_S, 3 * self._config.broker.heartbeat_s):
            self.say("error", f"the server did not answer for {silent:.0f} s")
        old, new = ({member.incarnation: member for member in each.members} for each in (before, now))
        for key, member in new.items():
            if key not in old:
                self.say("member", f"{member.id} is here ({member.state})")
            elif member.state != old[key].state and member.state in ("serving", "draining"):
                joined = old[key].state == "joining" or member.state == "draining"
                if joined:
                    self.say("member", f"{member.id} is {member.state}")
        for key in old.keys() - new.keys():
            self.say("member", f"{old[key].id} is gone")
        if now.version != before.version:
            self.say("version", f"version {now.version}")
        if (expired := now.ledger.expired - before.ledger.expired) > 0:
            self.say("expired", f"{expired} groups expired")
        if (dead := now.ledger.dead - before.ledger.dead) > 0:
            for letter in letters(min(dead, 3))[::-1]:
                self.say("dead", f"{letter.id} is dead-lettered: {letter.last_line or letter.kind:.300}")
        if before.ledger.balanced and not now.ledger.balanced:
            self.say("error", "the ledger does not balance")
        if now.evaluation is not None and now.evaluation != before.evaluation:
            self.say("evaluation", str(now.evaluation))

    def _snapshot(self, reading: Reading, finished: bool) -> dict[str, Any]:
        config, queues, ledger = self._config, reading.queues, reading.ledger
        generators = reading.in_role("generator")
        serving = [member.version for member in generators if member.state == "serving"]
        oldest = reading.unfinished.outstanding
        speeds = {process: _slope(counted) for process, counted in self._counted.items()}
        per_s = [speed for speed in speeds.values() if speed is not None]
        return {
            "run": config.run.run_id,
            "at": time.time() - (time.monotonic() - reading.at),
            "finished": finished,
            "version": reading.version,
            "max_steps": config.learner.max_steps,
            "stations": stations(reading),
            "rates": self._rates(reading),
            "balanced": ledger.balanced,
            "outstanding": ledger.outstanding,
            "outstanding_limit": config.max_outstanding,
            "lag_steps": queues.groups_waiting / config.learner.groups_per_step,
            "oldest_s": oldest.age_s if oldest else 0.0,
            "behind": reading.version - min(serving, default=reading.version),
            "max_staleness": config.staleness.max_staleness,
            "queue_bytes": reading.queue_bytes,
            "memory": reading.memory,
            "memory_limit": reading.memory_limit,
            "dead_letters": queues.dead_letters,
            "tokens_per_s": sum(per_s) if per_s else None,
            "record": {key: _number(self._record.get(key)) for key in RECORD_KEYS} if self._record else None,
            "evaluation": asdict(reading.evaluation) if reading.evaluation else None,
            "members": [
                {
                    "id": member.id, "role": member.role, "state": member.state, "version": member.version,
                    "tokens_per_s": speeds.get(member.incarnation),
                    "in_flight": member.counters.get("in_flight"), "seen_s": member.age_s,
                }
                for member in sorted(reading.members, key=lambda member: (member.role != "generator", member.id))
            ],
            "events": list(self._events)[::-1],
        }  # fmt: skip

    def _count(self, member: Member) -> deque[tuple[float, float]]:
        """What the process had sampled at its heartbeats of the last `_RATE_S`: answers count as they end."""
        counted = self._counted.get(member.incarnation, deque())
        wall_s = member.counters.get("wall_s", 0.0)
        if not counted or wall_s > counted[-1][0]:
            counted.append((wall_s, member.counters.get("tokens", 0.0)))
        while len(counted) > 2 and counted[1][0] <= wall_s - _RATE_S:
            counted.popleft()
        return counted

    def _rates(self, reading: Reading) -> dict[str, float]:
        """Groups a second over the last `_RATE_S`, by what happened to them."""
        self._ledgers.append((reading.at, reading.ledger))
        while len(self._ledgers) > 2 and self._ledgers[1][0] <= reading.at - _RATE_S:
            self._ledgers.popleft()
        began, before = self._ledgers[0]
        seconds, now = max(reading.at - began, 1e-9), reading.ledger
        names = ("released", "submitted", "trained", "filtered")
        return {name: max(0, getattr(now, name) - getattr(before, name)) / seconds for name in names}

    def _group(self, prompt: Prompt, group: Group) -> dict[str, Any]:
        """Of the answers the best and the worst ones."""
        ranked = sorted(group.responses, key=lambda response: -response.reward)
        chosen = ranked if len(ranked) <= 2 * _ENDS else [*ranked[:_ENDS], *ranked[-_ENDS:]]
        return {
            "id": group.group_id,
            "at": group.sampled_at,
            "generator": group.generator,
            "prompt": prompt.text[:_TEXT],
            "answers": [self._answer(response) for response in chosen],
            "size": len(group.responses),
        }

    def _answer(self, response: Response) -> dict[str, Any]:
        versions = [run.version for run in response.versions]
        try:
            text = self._decode(response.token_ids[:_TEXT].tolist())
        except Exception as error:  # ids that no tokenizer of this model made; libraries raise many kinds
            text = f"(cannot be decoded: {error!r})"
        return {
            "text": text[:_TEXT],
            "cut": len(text) > _TEXT or len(response.token_ids) > _TEXT,
            "reward": response.reward,
            "correct": response.correct,
            "tokens": len(response.token_ids),
            "truncated": response.finish_reason == "length",
            "versions": [min(versions), max(versions)],
        }


def _slope(counted: Sequence[tuple[float, float]]) -> float | None:
    if len(counted) < 2:
        return None
    (began, before), (now, after) = counted[0], counted[-1]
    return (after - before) / (now - began)


def _number(value: Any) -> float | None:
    """JSON has neither NaN nor infinities; six digits are more than a screen shows."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


def _json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
