"""Where every released prompt has to be at the end of a chaos run, and what a learner may never have done."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker import Broker, Ledger
from learner import checkpoint
from tests.chaos.prompts import fate


@dataclass
class Verdict:
    problems: list[str] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    trained: int = 0
    again: int = 0
    staleness: int = 0
    versions: int = 0
    lineages: int = 0

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.problems.append(text)


def read_diary(path: Path) -> list[dict[str, Any]]:
    """Lines of the learners; the last one of a killed learner may be torn."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


def judge(broker: Broker, seed: int, diary: list[dict[str, Any]], checkpoints: Path) -> Verdict:
    """The verdict on a run whose learner has finished."""
    verdict = Verdict(ledger=broker.ledger())
    folder = checkpoint.newest(checkpoints)
    assert folder is not None, "a finished learner leaves a checkpoint"
    weights = [group_id for group_id, _ in json.loads((folder / "weights.json").read_text())]
    verdict.trained, verdict.versions = len(weights), checkpoint.read_state(folder).version
    _judge_places(verdict, broker, seed, weights)
    _judge_steps(verdict, broker.config.staleness.max_staleness, diary)
    return verdict


def _judge_places(verdict: Verdict, broker: Broker, seed: int, weights: list[str]) -> None:
    """Every prompt released is in exactly one place, and the ledger counts the same."""
    ledger = verdict.ledger
    verdict.expect(ledger.balanced, f"the audit does not balance: {ledger}")
    released = [f"{position:09d}" for position in range(broker.position())]
    fresh = ledger.released - ledger.rereleased
    verdict.expect(fresh == len(released), f"released {fresh} for the first time, position {len(released)}")
    fates = {group_id: fate(seed, group_id) for group_id in released}
    twice = [group_id for group_id, times in Counter(weights).items() if times > 1]
    verdict.expect(not twice, f"{len(twice)} groups are in the surviving weights more than once: {twice[:5]}")
    trained, outstanding = set(weights), _outstanding(verdict, broker)
    strangers = sorted(group_id for group_id in trained if fates.get(group_id) not in ("trainable", "flaky"))
    verdict.expect(not strangers, f"trained, but never released or not trainable: {strangers[:5]}")
    both = sorted(trained & outstanding)
    verdict.expect(not both, f"{len(both)} groups are trained and outstanding: {both[:5]}")
    counted = {"filtered, all correct": ledger.filtered_correct, "filtered, all wrong": ledger.filtered_wrong,
               "dead": ledger.dead, "trained": ledger.trained, "settled": ledger.settled,
               "expired for good": ledger.expired - ledger.rereleased, "outstanding": ledger.outstanding}  # fmt: skip
    left = [(group_id, fates[group_id]) for group_id in released if group_id not in outstanding | trained]
    named = {"filtered, all correct": sum(what == "correct" for _, what in left),
             "filtered, all wrong": sum(what == "wrong" for _, what in left),
             "dead": sum(what == "dead" for _, what in left), "trained": len(trained), "settled": len(trained),
             "expired for good": sum(what in ("trainable", "flaky") for _, what in left),
             "outstanding": len(outstanding)}  # fmt: skip
    for name, count in counted.items():
        verdict.expect(count == named[name], f"{name}: the ledger counts {count}, by name there are {named[name]}")
    letters = {letter.group_id for letter in broker.dead_letters(1000)}
    verdict.expect(letters == {group_id for group_id, what in left if what == "dead"}, f"dead letters are {letters}")


def _outstanding(verdict: Verdict, broker: Broker) -> set[str]:
    client, keys = broker._client, broker.keys
    unsettled = {group_id.decode() for group_id in client.zrange(keys.unsettled, 0, -1)}
    names = [values[b"g"].decode() for _, values in client.xrange(keys.prompts) + client.xrange(keys.groups)]
    found = [name for name in names if name not in unsettled]
    verdict.expect(len(found) == len(set(found)), "a prompt is outstanding twice")
    known = {group_id.decode() for group_id in client.zrange(keys.outstanding, 0, -1)}
    verdict.expect(known == set(found), f"outstanding in one place only: {sorted(known ^ set(found))[:5]}")
    return set(found)


def _judge_steps(verdict: Verdict, max_staleness: int, diary: list[dict[str, Any]]) -> None:
    """No step had a token that is too old; no learner trained a group twice."""
    steps = [entry for entry in diary if entry["event"] == "step"]
    verdict.staleness = max((step["staleness"] for step in steps), default=0)
    verdict.expect(verdict.staleness <= max_staleness, f"staleness {verdict.staleness}, the bound is {max_staleness}")
    verdict.lineages = sum(entry["event"] == "begin" for entry in diary)
    times = Counter(group_id for step in steps for group_id in step["ids"])
    verdict.again = sum(count - 1 for count in times.values())
