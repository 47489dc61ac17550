"""Rewards: scoring completions in worker processes, and what the scores mean for a group."""

from generator.rewards.pool import RewardPool
from generator.rewards.scores import DataFailure, Score, shape, uninformative

__all__ = ["DataFailure", "RewardPool", "Score", "shape", "uninformative"]
