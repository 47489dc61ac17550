"""Groups that have arrived and wait for a batch; which of them the next batch takes, and whether it may be taken yet.

`mask` and `drop` take groups in the order in which they arrive; a prompt whose answers are long is overtaken, and its
first tokens may get too old. `wait` never lets that happen. Its argument, with bound s, B groups a step, and N(j) the
outstanding groups released at version j or before, wherever they are:

- a token is at least as new as its prompt's release, so a group released at r may be trained at versions up to r + s;
- the N(j) groups must therefore fit into the batches of versions V..j+s, B in each: N(j) <= (j + s - V + 1) B. The
  release budget makes this true for j = V, the newest release, since it bounds all that is outstanding by (s + 1) B;
- it stays true for older j as long as the batch at V leaves at most (j + s - V) B of the N(j) behind. So the batch
  takes the oldest B that have arrived, and waits for more to arrive while that leaves too many behind.

It cannot wait for ever: sampling does not depend on the learner's next step, so every outstanding prompt arrives, or
ends in another way, and then no longer counts. Where the premise fails (a resumed learner returns trained groups on top
of the budget, or goes back to an older version; a dead letter is put back) a batch is taken once it holds as many of
the due groups as fit, and groups that do get too old expire whole and are sampled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from broker import Delivery
from common.config import Config
from learner.batch import expired


class Pending:
    """Not thread-safe; no clock, no Redis: what is outstanding is told to `choose`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._deliveries: list[Delivery] = []
        self._tokens = 0  # of the responses of all of them

    @property
    def full(self) -> bool:
        """Whether there are enough for a batch, groups or tokens."""
        learner = self._config.learner
        enough = learner.tokens_per_step is not None and self._tokens >= learner.tokens_per_step
        return enough or len(self._deliveries) >= learner.groups_per_step

    def add(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        self._tokens += delivery.group.response_tokens

    def _keep(self, deliveries: list[Delivery]) -> None:
        self._deliveries = deliveries
        self._tokens = sum(each.group.response_tokens for each in deliveries)

    def take_expired(self, version: int) -> list[Delivery]:
        """Those too old to train at policy `version`, which wait no longer."""
        old = [each for each in self._deliveries if expired(each.group, self._config, version)]
        gone = {each.entry_id for each in old}
        self._keep([each for each in self._deliveries if each.entry_id not in gone])
        return old

    def bounds(self, version: int) -> list[int]:
        """The versions j for which `choose` at policy `version` must be told N(j); none unless the policy is `wait`."""
        staleness = self._config.staleness
        if staleness.expired_tokens != "wait":
            return []
        return list(range(version - staleness.max_staleness, version + 1))

    def choose(self, version: int, outstanding: Sequence[int]) -> tuple[Delivery, ...] | None:
        """The groups of the batch at policy `version`, which wait no longer; None: more have to arrive first.

        Args:
            version: the learner's policy version.
            outstanding: N(j) for the j of `bounds(version)`.
        """
        if not self.full:
            return None
        wanted, bounds = self._config.learner.groups_per_step, self.bounds(version)
        # Stable: groups of one version stay in the order of their arrival.
        ordered = sorted(self._deliveries, key=lambda each: each.group.released_version) if bounds else self._deliveries
        count = min(wanted, self._reaching(ordered))
        batch, rest = ordered[:count], ordered[count:]
        for bound, count in zip(bounds, outstanding, strict=True):
            later = (bound + self._config.staleness.max_staleness - version) * wanted
            taken = sum(each.group.released_version <= bound for each in batch)
            if taken < min(count - later, wanted):
                return None
        self._keep(rest)
        return tuple(batch)

    def _reaching(self, deliveries: Sequence[Delivery]) -> int:
        """How many of them, from the first on, hold `tokens_per_step`; all of them where that is not reached."""
        if (limit := self._config.learner.tokens_per_step) is None:
            return len(deliveries)
        totals = accumulate(each.group.response_tokens for each in deliveries)
        return next((count for count, total in enumerate(totals, 1) if total >= limit), len(deliveries))
