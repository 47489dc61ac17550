"""What each technique does, measured: the ablation chain of the DAPO paper's Table 1, and staleness against correction.

    python -m benchmarks.ablation chain [--seeds 3] [--steps 60] [--out runs/ablation]
    python -m benchmarks.ablation staleness [--seeds 3] [--steps 60] [--out runs/ablation]

Both train the model of `benchmarks.small_task` through the real fleet (`benchmarks.lab`), a minute or two a run on
two cores. `chain` lays the overlays of `examples/table1` over `benchmarks/ablation.yaml`, one more for each row;
`staleness` crosses `max_staleness` 0, 1, 4, 16 with the corrections none, decoupled and bypass. Results go to
`<out>/<name>.json` after every run, so that an interrupted call goes on where it was; the table goes to standard
output; curves of reward, accuracy, entropy, length and mean probability to one PNG each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import small_task
from benchmarks.lab import Lab, Outcome
from common import settings
from common.config import Config

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "benchmarks" / "ablation.yaml"
CURVES = {
    "reward_mean": "shaped reward of trained groups",
    "sampled_accuracy": "accuracy of all sampled groups",
    "entropy": "entropy, nats per token",
    "response_length_mean": "response length, tokens",
    "probability": "mean probability of sampled tokens",
}
LAST = 10  # steps that "final" averages over


@dataclass(frozen=True)
class Variant:
    """One row: its name and what is laid over the base."""

    name: str
    overrides: tuple[str, ...]


def chain() -> list[Variant]:
    """The rows of Table 1, each with everything of those before it."""
    overlays = sorted((ROOT / "examples" / "table1").glob("*.yaml"))
    names = [overlay.stem.split("-", 1)[1] for overlay in overlays]
    rows = []
    for count in range(1, len(overlays) + 1):
        laid = [str(overlay) for overlay in overlays[:count]]
        if "soft-overlong" in names[:count]:  # the paper's L_cache is for 20480 tokens; a quarter of the limit here
            laid.append(f"objective.overlong_cache_tokens={small_task.MAX_RESPONSE_TOKENS // 4}")
        rows.append(Variant(("+ " if count > 1 else "") + names[count - 1], tuple(laid)))
    return rows


def staleness() -> list[Variant]:
    """Every bound with every correction. One large update per batch: there bypass and decoupled differ most, and a
    version makes a difference."""
    shared = ("learner.updates_per_batch=1", "learner.optimizer.lr=1.0e-3")
    return [
        Variant(f"{bound} {mode}", (*shared, f"staleness.max_staleness={bound}", f"objective.correction.mode={mode}"))
        for bound, mode in itertools.product((0, 1, 4, 16), ("none", "decoupled", "bypass"))
    ]


def configure(variant: Variant, task: tuple[Path, Path], seed: int, steps: int, extra: list[str]) -> Config:
    model, prompts = task
    run_id = "".join(c if c.isalnum() else "-" for c in variant.name).strip("-")
    return settings.load(
        BASE,
        [
            *variant.overrides,
            f"model.path={model}",
            f"prompts.path={prompts}",
            f"run.seed={seed}",
            f"run.id=ablation-{run_id}-{seed}-{int(time.time())}",
            f"learner.max_steps={steps}",
            *extra,
        ],
        environ={},
    )


async def measure(name: str, variants: list[Variant], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not yet in the results file; seeds outermost, so that an early stop leaves whole columns."""
    out: Path = arguments.out
    file = out / f"{name}.json"
    results: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    done = {(result["variant"], result["seed"]) for result in results}
    wanted = [(seed, variant) for seed in range(arguments.seeds) for variant in variants]
    missing = [(seed, variant) for seed, variant in wanted if (variant.name, seed) not in done]
    task = small_task.make(out / "task")
    if not missing:
        return results
    async with Lab.open(out, configure(variants[0], task, 0, arguments.steps, arguments.set)) as lab:
        for seed, variant in missing:
            started = time.monotonic()
            outcome = await lab.run(configure(variant, task, seed, arguments.steps, arguments.set))
            results.append(record(variant.name, seed, outcome))
            file.write_text(json.dumps(results), encoding="utf-8")
            final = results[-1]
            print(
                f"{variant.name:24} seed {seed}: accuracy {final['final_accuracy']:.3f}, "
                f"entropy {final['final_entropy']:.3f}, {time.monotonic() - started:.0f} s "
                f"({len(results)} of {len(wanted)})",
                file=sys.stderr,
                flush=True,
            )
    return results


def record(variant: str, seed: int, outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run."""
    kept = (*CURVES, "staleness_mean", "staleness_max", "zero_advantage_share", "grad_norm", "step_s", "weight_mean")
    curves = {key: [record.get(key, 0.0) for record in outcome.records] for key in kept}
    final = {"final_accuracy": outcome.accuracy, "final_entropy": outcome.entropy}
    return {"variant": variant, "seed": seed, **final, **curves}


def table(results: list[dict[str, Any]], variants: list[Variant]) -> str:
    """Mean and standard deviation over seeds, in Markdown."""
    lines = [
        "| variant | accuracy | entropy | length | zero-advantage share | staleness mean (max) | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        runs = [result for result in results if result["variant"] == variant.name]
        if not runs:
            continue
        cells = [
            spread([run["final_accuracy"] for run in runs]),
            spread([run["final_entropy"] for run in runs]),
            spread([statistics.mean(run["response_length_mean"][-LAST:]) for run in runs], 1),
            f"{over_steps(runs, 'zero_advantage_share'):.2f}",
            f"{over_steps(runs, 'staleness_mean'):.2f} ({max(max(run['staleness_max']) for run in runs):.0f})",
            str(len(runs)),
        ]
        lines.append(f"| {variant.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def over_steps(runs: list[dict[str, Any]], key: str) -> float:
    """Mean over all steps of all runs."""
    return statistics.mean(statistics.mean(run[key]) for run in runs)


def spread(values: list[float], digits: int = 3) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def draw(name: str, results: list[dict[str, Any]], variants: list[Variant], out: Path) -> None:
    """One PNG per curve: the mean over seeds, and the range between the lowest and the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for key, label in CURVES.items():
        figure, axes = pyplot.subplots(figsize=(8, 5))
        for variant in variants:
            curves = [result[key] for result in results if result["variant"] == variant.name]
            if not curves:
                continue
            columns = list(zip(*curves, strict=False))
            steps = range(1, len(columns) + 1)
            (line,) = axes.plot(steps, [statistics.mean(column) for column in columns], label=variant.name)
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(steps, low, high, alpha=0.12, color=line.get_color())
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(out / f"{name}-{key}.png", dpi=120)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["chain", "staleness"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ablation")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    logging.disable(logging.INFO)
    variants = {"chain": chain, "staleness": staleness}[arguments.what]()
    results = asyncio.run(measure(arguments.what, variants, arguments))
    draw(arguments.what, results, variants, arguments.out)
    print(table(results, variants))


if __name__ == "__main__":
    main()
