"""The run as the autoscaler sees it, from the members' heartbeats and the queues.

A generator's heartbeat counts `groups`, `wall_s` and `blocked_s`; the learner's `steps`, `step_s` (seconds in optimizer
steps and around them) and `starved_s` (seconds it waited for groups).
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.autoscale import Consumed, Observation, Produced
from broker.records import Member, Queues
from common.config import Config


def observe(config: Config, members: Sequence[Member], queues: Queues, at: float) -> Observation:
    """The run at second `at` of the caller's clock."""
    busy = queues.prompts_leased + queues.groups_held
    return Observation(
        at=at,
        backlog=queues.groups_waiting,
        capacity=max(1, config.max_outstanding - busy),
        generators={each.id: _produced(each) for each in members if each.role == "generator"},
        learner=next((_consumed(each) for each in members if each.role == "learner"), None),
    )


def _produced(member: Member) -> Produced | None:
    """None while it loads or drains: that time says nothing about what it can do."""
    counters = member.counters
    if member.state != "serving" or not counters.keys() >= {"groups", "wall_s", "blocked_s"}:
        return None
    return Produced(counters["groups"], counters["wall_s"] - counters["blocked_s"])


def _consumed(member: Member) -> Consumed | None:
    counters = member.counters
    if not counters.keys() >= {"steps", "step_s", "starved_s"}:
        return None
    return Consumed(counters["steps"], counters["step_s"], counters["starved_s"])
