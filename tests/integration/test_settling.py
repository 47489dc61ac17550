"""What a checkpoint has to name, on a real server that may have lost its last second."""

from __future__ import annotations

import pytest
from broker_helpers import submit

from broker import Broker
from learner import settling
from learner.collector import Batch
from learner.settling import Settling


def test_settled_groups_are_named_until_the_server_cannot_lose_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(broker, 2)
    epoch = broker.begin(0, [])
    inside = Settling(broker, epoch, broker.config)
    for version in (1, 2):
        inside.trained(version, Batch(tuple(broker.take(epoch, 1, 0)), 0.0))
        assert not inside.all_settled
        inside.saved("snapshot", inside.ids)
        assert inside.all_settled
    assert inside.ids == ("000000000", "000000001")
    monkeypatch.setattr(settling, "DURABLE_S", 0.0)
    inside.saved("snapshot", inside.ids)
    assert inside.ids == ()


def test_a_settling_that_was_lost_is_repeated_and_named_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "DURABLE_S", 0.0)
    submit(broker, 1)
    epoch = broker.begin(0, [])
    inside = Settling(broker, epoch, broker.config, ["000000000"])  # as the learner knows it: settled
    broker.step(epoch, 1, broker.take(epoch, 1, 0))  # as the server does: trained only
    inside.saved("snapshot", inside.ids)
    assert (broker.ledger().settled, inside.ids) == (1, ("000000000",))
    inside.saved("snapshot", inside.ids)
    assert inside.ids == ()
