"""Processes that a generator started end with it, also where it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As vLLM does: the engine makes a worker, and each loads the plug-in in its own time.
GENERATOR = """
import subprocess, sys, time
from generator import lifeline
lifeline.tie()
engine = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]);" + sys.argv[1]
subprocess.Popen([sys.executable, "-c", engine, sys.argv[1]])
time.sleep(60)
"""
FOLLOWS = """
import time
from generator import lifeline
lifeline.follow()
lifeline.follow()
print('up', flush=True)
time.sleep(60)
"""


def test_engine_and_worker_end_with_a_generator_that_is_killed() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", GENERATOR, FOLLOWS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as generator:
        assert generator.stdout is not None
        assert [generator.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        generator.send_signal(signal.SIGKILL)
        # All that held the pipe are gone.
        assert generator.stdout.read() == ""


def test_other_processes_live_on() -> None:
    code = "from generator import lifeline; lifeline.follow(); lifeline.tie(); lifeline.follow(); print('lives')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"lives\n")


def test_generator_that_ended_before_its_process_came_up_is_followed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HEADRACE_ENGINE_OF": str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", FOLLOWS], env=environ, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, b"")
