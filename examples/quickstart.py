"""The quickstart: a pretrained model gets better at sums it has not seen, on two CPU cores.

    python examples/quickstart.py [--seed N]

Makes the model folder, evaluates it on held-out prompts, trains with `headrace up`, evaluates again, draws the
learning curve. Everything it does is the commands it prints; nothing here is special.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from make_models import make_smollm2

ROOT = Path(__file__).resolve().parent.parent  # everything below is relative to it
CONFIG = Path("examples/quickstart.yaml")
MODEL = Path("models/smollm2-135m-instruct")


def headrace(*arguments: str) -> None:
    """Run one headrace command, shown first; end with its exit code if it fails."""
    print(f"\n$ headrace {' '.join(arguments)}", flush=True)
    code = subprocess.run([str(Path(sys.executable).parent / "headrace"), *arguments], check=False).returncode
    if code:
        sys.exit(code)


def draw(metrics: list[dict[str, float]], before: float, after: float, out: Path) -> None:
    """The learning curve: raw accuracy of sampled training groups by step, and held-out accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [record["step"] for record in metrics]
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(steps, [record["sampled_accuracy"] for record in metrics], label="training prompts, as sampled")
    axis.plot([0, steps[-1]], [before, after], "o", label="held-out prompts")
    axis.set(xlabel="optimizer step", ylabel="accuracy", ylim=(0, 1), title="SmolLM2-135M, one-digit sums")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def show_answers(before: dict, after: dict, count: int = 3) -> None:
    """The same prompts, before and after: first those that training turned right."""
    pairs = list(zip(before["answers"], after["answers"], strict=True))
    pairs.sort(key=lambda pair: bool(pair[0]["correct"]) or not pair[1]["correct"])
    for old, new in pairs[:count]:
        question = old["prompt"].split("problem:")[-1].split("Reply")[0].strip()
        print(f"  {question:12} before: {old['completion'].strip()!r:45} after: {new['completion'].strip()!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    started = time.monotonic()
    make_smollm2(MODEL)

    run_id = time.strftime(f"quickstart-s{arguments.seed}-%Y%m%d-%H%M%S")
    folder = Path("runs") / run_id
    seed = ("--set", f"run.seed={arguments.seed}")
    headrace("eval", str(CONFIG), *seed, "--out", str(folder.with_suffix(".before.json")))
    headrace("up", str(CONFIG), *seed, "--run-id", run_id)
    final = max((folder / "checkpoints").glob("step-*")) / "model"
    headrace("eval", str(CONFIG), *seed, "--model", str(final), "--out", str(folder / "after.json"))

    folder.with_suffix(".before.json").rename(folder / "before.json")
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    draw(metrics, before["accuracy"], after["accuracy"], folder / "learning_curve.png")
    print("\nThree answers:")
    show_answers(before, after)
    ratio = after["accuracy"] / max(before["accuracy"], 1e-9)
    print(
        f"\nHeld-out accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f} ({ratio:.1f} x) "
        f"in {(time.monotonic() - started) / 60:.1f} minutes\n"
        f"  run folder      {folder}\n  learning curve  {folder / 'learning_curve.png'}\n  trained model   {final}\n"
        f"  metrics         {folder / 'metrics.jsonl'}, tensorboard --logdir {folder / 'tensorboard'}"
    )


if __name__ == "__main__":
    main()
