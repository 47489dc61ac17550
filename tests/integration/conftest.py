"""Fixtures of the integration tests."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.config import Config

if TYPE_CHECKING:
    from generator.engine import Engine

MAKE_MODELS = Path(__file__).parents[2] / "examples" / "make_models.py"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Llama of `examples/make_models.py`, made once per session."""
    spec = importlib.util.spec_from_file_location("make_models", MAKE_MODELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.make_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    """The session's one vLLM engine, on the tiny model in float32, without a version of its own. Tests that use it run
    on the session's event loop (`pytest.mark.asyncio(loop_scope="session")`) and bring it weights first."""
    from generator.engine import Engine

    config = Config.model_validate(
        {
            "run": {"name": "engine"},
            "model": {"path": str(tiny_model)},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": 4, "max_prompt_tokens": 64, "max_response_tokens": 160},
            "generator": {"dtype": "float32", "kv_cache_mb": 128, "max_num_seqs": 16},
            "weights": {"backend": "gloo"},
        }
    )
    started = Engine(config, "g1")
    await started.start()
    yield started
    await started.close()
