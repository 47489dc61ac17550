"""What asynchrony buys: the tiny model trained synchronously (generate, then train) and asynchronously, in one call.

    python -m benchmarks.overlap [--steps N] [--json]

Both runs are real fleets (`headrace up`), the same but for one setting: `staleness.max_staleness` 0 makes the release
budget hand out one batch at a time, so that generating and training take turns. The first steps warm up and do not
count. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3


def measure(name: str, folder: Path, steps: int, settings: list[str]) -> list[dict[str, float]]:
    """Run a fleet and return the metrics of its steps after the warm-up."""
    sets = [f"--set={item}" for item in [f"run.dir={folder}", *settings]]
    command = [str(Path(sys.executable).parent / "headrace"), "up", "examples/tiny.yaml", "--run-id", name]
    subprocess.run([*command, "--max-steps", str(steps), *sets], cwd=ROOT, check=True, stdout=sys.stderr)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP:]


def mean(records: list[dict[str, float]], key: str) -> float:
    """Mean of a share, weighted by how long each step took."""
    return sum(record[key] * record["step_s"] for record in records) / sum(record["step_s"] for record in records)


def groups_per_s(records: list[dict[str, float]]) -> float:
    return sum(record["groups"] for record in records) / sum(record["step_s"] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    # A batch in which sampling and training weigh about the same on one core each.
    shared = ["learner.groups_per_step=8", "generator.prompts_in_flight=8", "learner.checkpoint_every=1000"]
    with tempfile.TemporaryDirectory() as folder:
        sync = measure("sync", Path(folder), arguments.steps, [*shared, "staleness.max_staleness=0"])
        overlapped = measure("async", Path(folder), arguments.steps, [*shared, "staleness.max_staleness=2"])
    result = {
        "sync_groups_per_s": groups_per_s(sync),
        "async_groups_per_s": groups_per_s(overlapped),
        "ratio": groups_per_s(overlapped) / groups_per_s(sync),
        "learner_wait_share": mean(overlapped, "learner_wait_share"),
        "generator_blocked_share": mean(overlapped, "generator_blocked_share"),
        "sync_learner_wait_share": mean(sync, "learner_wait_share"),
        "sync_generator_blocked_share": mean(sync, "generator_blocked_share"),
        "overlapped_groups": sum(record["overlapped_groups"] for record in overlapped),
    }
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:30} {value:.3f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
