"""Fixtures every test may use: a real Valkey server for the session, a small configuration, a broker of a fresh run."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from broker import Broker, Server
from common.config import BrokerConfig, Config

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """What runs as a process elsewhere sets up its log; in here the next test's `caplog` would see nothing more."""
    logger = logging.getLogger("headrace")
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers

# On a busy machine one example out of hundreds takes longer than any deadline; pytest's timeout catches what hangs.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server; tests keep apart by their run ids."""
    with Server(BrokerConfig(maxmemory_mb=256)).start(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def make_config(valkey: Server, tmp_path: Path) -> MakeConfig:
    """`make_config(learner={"groups_per_step": 2}, ...)`: a small valid configuration on the session's server, with
    a run id of its own; keyword arguments are merged into its sections."""

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"name": "test", "id": f"test-{uuid.uuid4().hex[:12]}", "dir": tmp_path / "runs"},
            "model": {"path": str(tmp_path / "model")},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 100},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": 2, "max_prompt_tokens": 64, "max_response_tokens": 16},
            "broker": {"url": valkey.url, "password_file": valkey.password_file},
            "learner": {"groups_per_step": 4, "micro_batch_tokens": 256, "max_steps": 10},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        return Config.model_validate(tree)

    return make


@pytest.fixture
def broker(make_config: MakeConfig) -> Iterator[Broker]:
    connected = Broker.connect(make_config())
    yield connected
    connected.close()
