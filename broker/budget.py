"""The release budget (architecture, invariant 4): how many prompts the feeder may release now.

A pure function of what happened. Outstanding groups are measured from the streams, never derived from what should have
happened, so filtering, partial batches, restarts and resizing cannot make the budget leak.
"""

from __future__ import annotations

from broker.records import Ledger
from common.config import Config


def may_release(ledger: Ledger, config: Config) -> int:
    """Prompts that may be released, >= 0: `max_outstanding - outstanding`.

    Outstanding may exceed the bound after a learner restart, when trained groups return to it; then nothing is released
    until it falls below.
    """
    return max(0, config.max_outstanding - ledger.outstanding)
