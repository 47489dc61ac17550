"""What a checkpoint has to name, on a real server that may have lost its last second."""

from __future__ import annotations

import pytest
from broker_helpers import MakeConfig, TwiceBroker, ids, submit

from broker import Broker
from common.errors import HeadraceError
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


def test_settle_on_step_sent_twice_trains_and_settles_once(make_config: MakeConfig) -> None:
    config = make_config()
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"settle_on": "step"})})
    broker = TwiceBroker.connect(config)
    submit(broker, 3)
    epoch = broker.begin(0, [])
    inside = Settling(broker, epoch, config)
    for version in (1, 2):
        inside.trained(version, Batch(tuple(broker.take(epoch, 1, 0)), 0.0))
        ledger = broker.ledger()
        assert (ledger.trained, ledger.settled, ledger.outstanding) == (version, version, 3 - version)
        assert ledger.balanced
    assert broker.queues().unsettled == 0 and broker.version() == 2
    broker.close()


def test_step_of_groups_the_server_has_not_delivered_writes_nothing(broker: Broker) -> None:
    submit(broker, 2)
    epoch = broker.begin(0, [])
    first, second = broker.take(epoch, 2, 0)
    broker.step(epoch, 1, [first], [first.group.group_id])
    before = broker.ledger()
    for version, deliveries in ((1, [second]), (2, [first, second]), (2, [first]), (3, [second])):
        with pytest.raises(HeadraceError, match="LOST"):
            broker.step(epoch, version, deliveries, [second.group.group_id])
    assert broker.ledger() == before and broker.version() == 1
    assert broker.step(epoch, 2, [second], [second.group.group_id]) == 1


def test_step_of_more_groups_than_one_command_takes(broker: Broker) -> None:
    submit(broker, 1001)
    epoch = broker.begin(0, [])
    taken = broker.take(epoch, 2000, 0)
    assert broker.step(epoch, 1, taken) == 0
    assert (broker.queues().unsettled, broker.ledger().balanced) == (1001, True)
    assert broker.settle(epoch, ids(taken)) == 1001
    assert (broker.ledger().settled, broker.queues().unsettled) == (1001, 0)


def test_server_that_forgot_the_last_steps_does_not_leave_the_learner_waiting(broker: Broker) -> None:
    submit(broker, 2)
    epoch = broker.begin(0, [])
    broker.step(epoch, 1, broker.take(epoch, 2, 0))
    assert broker.take(epoch, 1, 0) == []
    broker._client.hset(broker.keys.state, "version", 0)  # what a power cut takes back
    with pytest.raises(HeadraceError, match=f"LOST writes of learner epoch {epoch}.*version 1"):
        broker.take(epoch, 1, 0)
