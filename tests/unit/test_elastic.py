"""How many nodes make so many ranks, and by which address a machine is reached."""

from __future__ import annotations

import socket

import pytest
from pydantic import ValidationError

from broker.addresses import own_address
from broker.elastic import nodes_for
from common.config import Config
from common.errors import ConfigError


def config(ranks: int = 2, elastic: dict[str, int] | None = None) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "model"},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "learner": {"ranks": ranks, "elastic": elastic},
        }
    )


def test_ranks_become_nodes_within_the_bounds() -> None:
    elastic = config(2, {"min_nodes": 2, "max_nodes": 4})
    assert nodes_for(elastic, 4) == 2 and nodes_for(elastic, 8) == 4
    with pytest.raises(ConfigError, match=r"5 ranks: a node has 2 \(learner\.ranks\)"):
        nodes_for(elastic, 5)
    with pytest.raises(ConfigError, match=r"10 ranks: 5 nodes, outside .*max_nodes \(4\); use 4 to 8"):
        nodes_for(elastic, 10)
    with pytest.raises(ConfigError, match=r"learner\.elastic: not set"):
        nodes_for(config(), 2)


def test_more_least_than_most_nodes_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"max_nodes is 2, less than min_nodes \(3\); use at least 3"):
        config(1, {"min_nodes": 3, "max_nodes": 2})


@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/valkey.sock",
        "redis://127.0.0.1:6379/0",
        "redis+sentinel://127.0.0.1:26379,127.0.0.2:26379/service",
        "redis://host.invalid:6379",
    ],
)
def test_server_on_this_machine_or_unknown_means_loopback(url: str) -> None:
    assert own_address(url) == "127.0.0.1"


def test_address_is_that_of_the_route_to_the_server() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 6379))
        except OSError:
            pytest.skip("this machine has no route to anywhere else")
        expected = probe.getsockname()[0]
    assert own_address("rediss://192.0.2.1:6379/0") == expected != "127.0.0.1"
