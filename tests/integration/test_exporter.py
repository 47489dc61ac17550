"""What the broker service shows of a run is what the run's ledger says."""

from __future__ import annotations

import re
import threading
import urllib.request
from pathlib import Path

from broker_helpers import MakeConfig, group, lease
from prometheus_client.parser import text_string_to_metric_families
from valkey_helpers import free_port, until

from broker import Broker, Member
from broker.service import run_service
from common import catalogue


def _values(port: int) -> dict[str, float]:
    """`name` or `name{label=value}` -> value, of our own families."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(f"{{{value}}}" for label, value in sample.labels.items() if label != "run"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_service_shows_the_run(make_config: MakeConfig, tiny_model: Path) -> None:
    port = free_port()
    often = {"heartbeat_s": 0.05, "member_ttl_s": 5.0}
    config = make_config(model={"path": str(tiny_model)}, metrics={"port": port}, broker=often)
    stop = threading.Event()
    service = threading.Thread(target=run_service, args=(config, stop), daemon=True)
    service.start()
    broker = Broker.connect(config)
    until(lambda: broker.ledger().released == config.max_outstanding)
    broker.heartbeat(Member("g1", "generator", "serving", version=0))
    first, second, third = lease(broker, 3)
    assert broker.submit("g1", first, group(first.prompt.group_id))
    assert broker.submit("g1", second, group(second.prompt.group_id))
    assert broker.filtered("g1", third.entry_id, "wrong")
    epoch = broker.begin(0, [])
    (taken,) = broker.take(epoch, 1, 0)
    broker.step(epoch, 1, [taken])
    until(lambda: _values(port).get("headrace_groups_trained_total") == 1)
    shown, ledger = _values(port), broker.ledger()
    assert shown["headrace_policy_version"] == 1
    assert shown["headrace_generators_behind"] == 1
    assert shown["headrace_members{generator}{serving}"] == 1
    assert shown["headrace_groups_filtered_total{wrong}"] == 1 and shown["headrace_groups_filtered_total{equal}"] == 0
    assert shown["headrace_lag_groups"] == 1 and shown["headrace_lag_steps"] == 1 / 4
    assert shown["headrace_groups_unsettled"] == 1
    assert shown["headrace_conservation_error"] == 0 == ledger.released - ledger.accounted
    assert sum(v for name, v in shown.items() if name.startswith("headrace_groups_outstanding{")) == ledger.outstanding
    assert shown["headrace_queue_bytes"] > 0 and shown["headrace_redis_memory_limit_bytes"] == 256 << 20
    assert {re.sub(r"{.*", "", name) for name in shown} == {metric.name for metric in catalogue.RUN}
    stop.set()
    service.join(10)
    broker.close()
