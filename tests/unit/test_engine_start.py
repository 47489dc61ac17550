"""A generator that is told to leave while its engine starts does not wait for it."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time

import pytest

from common.config import Config
from generator.engine import Engine, EngineError


async def test_start_cancelled_ends_the_processes_it_began_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "none"},
            "prompts": {"type": "dataset", "path": "none"},
            "reward": {"type": "math_dapo"},
            "weights": {"backend": "gloo"},
        }
    )
    engine, running = Engine(config, "g1"), threading.Event()
    core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    bystander = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    bystander.start()

    def build() -> None:
        core.start()
        running.set()
        core.join()
        raise RuntimeError("the engine's process died")

    monkeypatch.setattr(engine, "_build", build)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(running.wait)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 20)
    assert core.exitcode is not None and bystander.is_alive()
    bystander.kill()
    with pytest.raises(EngineError, match="not running"):
        await engine.control(asyncio.sleep(0), "pause_generation")
    await engine.close()
