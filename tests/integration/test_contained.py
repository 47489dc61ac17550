"""What a checkpoint has to name, on a real server that may have lost its last second."""

from __future__ import annotations

import pytest
from broker_helpers import ids, submit

from broker import Broker
from learner import contained
from learner.contained import Contained


def test_settled_groups_are_named_until_the_server_cannot_lose_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(broker, 2)
    epoch, inside = broker.begin(0, []), Contained(())
    for version in (1, 2):
        taken = broker.take(epoch, 1, 0)
        broker.step(epoch, version, taken)
        inside.add(ids(taken))
        assert inside.fresh == 1
        inside.settle(broker, epoch)
        assert inside.fresh == 0
    assert inside.ids == ("000000000", "000000001")
    monkeypatch.setattr(contained, "DURABLE_S", 0.0)
    inside.settle(broker, epoch)
    assert inside.ids == ()


def test_a_settling_that_was_lost_is_repeated_and_named_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contained, "DURABLE_S", 0.0)
    submit(broker, 1)
    epoch, inside = broker.begin(0, []), Contained(["000000000"])  # as the learner knows it: settled
    broker.step(epoch, 1, broker.take(epoch, 1, 0))  # as the server does: trained only
    inside.settle(broker, epoch)
    assert (broker.ledger().settled, inside.ids) == (1, ("000000000",))
    inside.settle(broker, epoch)
    assert inside.ids == ()
