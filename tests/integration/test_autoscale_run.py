"""The wish for generators in a real run on the tiny model, read where KEDA reads it: a slow learner makes it shrink, a
fast one makes it grow again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_run import LiveRun, tiny_run

WISH = "headrace_generators_desired"
STOPPED_S, RUNNING_S = 0.9, 0.1


@contextmanager
def slowed(run: LiveRun) -> Iterator[None]:
    """The learner has a tenth of its time, as on a node that is overcommitted."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            run.signal("learner", signal.SIGSTOP)
            over.wait(STOPPED_S)
            run.signal("learner", signal.SIGCONT)
            over.wait(RUNNING_S)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_slow_learner_shrinks_the_wish_and_a_fast_one_grows_it(tmp_path: Path, tiny_model: Path) -> None:
    # Long answers and small steps: this learner could train on what several such generators make.
    changes = {
        "sampling": {"max_response_tokens": 96},
        "generator": {"prompts_in_flight": 1},
        "learner": {"groups_per_step": 2, "max_steps": 100_000, "checkpoint_every": 50},
    }
    with tiny_run(tmp_path, tiny_model, **changes) as (environ, file):
        run = LiveRun(tmp_path, environ, file)
        try:
            run.until("three generators wanted", lambda: run.gauge("broker", WISH) >= 3)
            wanted = run.gauge("broker", WISH)
            with slowed(run):
                run.until("fewer wanted", lambda: 1 <= run.gauge("broker", WISH) <= wanted / 2)
            run.until("as many wanted again", lambda: run.gauge("broker", WISH) >= wanted)
        finally:
            run.close()
