"""Rewards: scoring completions in worker processes, and what the scores mean for a group."""

from generator.rewards.pool import RewardPool
from generator.rewards.scores import DataFailure, FailureKind, Score, shape, uninformative

__all__ = ["DataFailure", "FailureKind", "RewardPool", "Score", "shape", "uninformative"]
