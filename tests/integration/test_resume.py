"""A few seconds of `python -m tests.chaos.resume`, and what resuming says about what it cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_killed_with_two_ranks_and_resumed_with_one_ends_with_the_same_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.resume", "--case", "2:1:2", "--json"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")] or [done.stderr[-3000:]]
    outcome = json.loads(line)
    assert done.returncode == 0 and not outcome["failed"], outcome
    assert outcome["weights"] < 1e-6 and outcome["killed_at"] < 10
