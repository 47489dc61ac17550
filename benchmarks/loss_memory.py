"""Memory and time of log-probabilities, entropy, loss and backward from hidden states, beside the plain way.

    python -m benchmarks.loss_memory [--json] [--tokens N] [--peers PYTHON]

By vocabulary (49,152 at width 576, SmolLM2's; 151,936 at width 896, Qwen2.5-0.5B's), float32, a clipped objective:
the plain way (whole logits, log_softmax, entropy), ours, TRL's pieces (its selective log-softmax and entropy over whole
logits), and Liger's chunked GRPO loss. Each runs in a process of its own, once to warm up on a few tokens and once
measured. Peak memory is the process's largest resident size over that before; both ratios are to the plain way. Peers
are imported by the interpreter `--peers` (they are no dependency), and are null with a reason where they do not run.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"49k": (49_152, 576), "152k": (151_936, 896)}
TEMPERATURE = 0.9
Logprobs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T) / TEMPERATURE
    log_p = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from learner.head import head_logprobs

    return head_logprobs(hidden, weight, None, targets, TEMPERATURE)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # type: ignore[import-not-found]

    logits = (hidden @ weight.T) / TEMPERATURE
    logp = selective_log_softmax(logits, targets)
    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    return logp, entropy


def clipped(logp: Tensor, entropy: Tensor) -> Tensor:
    """A clipped loss of ratio 1, so that backward has a factor for every token; the entropy is only a metric."""
    advantage = torch.linspace(-1, 1, len(logp))
    ratio = (logp - logp.detach()).exp()
    entropy.mean().item()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)).sum() / len(logp)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Its loss has no entropy; sequences of 128 tokens, not compiled (it would need a C++ compiler)."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore[import-not-found]

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=False, temperature=TEMPERATURE)
    rows = max(1, len(targets) // 128)
    shaped = hidden.view(rows, -1, hidden.shape[-1])
    mask = torch.ones(shaped.shape[:2])
    value = loss(shaped, weight, targets.view(rows, -1), mask, torch.linspace(-1, 1, rows))
    first: Tensor = value[0] if isinstance(value, tuple) else value
    return first


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Peak:
    """The largest resident size while it is entered, looked at every 2 ms, over that at the start; bytes."""

    def __enter__(self) -> Peak:
        self.base, self.most, self._stop = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, resident() - self.base)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def case(name: str, vocabulary: str, tokens: int) -> dict[str, float]:
    """One forward and backward: seconds of processor time, and MiB."""
    torch.manual_seed(0)
    size, width = MODELS[vocabulary]

    def run(count: int) -> float:
        hidden = torch.randn(count, width).requires_grad_()
        weight = torch.randn(size, width).mul_(0.05).requires_grad_()
        targets = torch.randint(0, size, (count,))
        with Peak() as peak:
            started = time.process_time()
            if name == "liger":
                loss = liger(hidden, weight, targets)
            else:
                loss = clipped(*{"plain": plain, "ours": ours, "trl": trl}[name](hidden, weight, targets))
            loss.backward()
            seconds = time.process_time() - started
        results[:] = [seconds, peak.most / 2**20]
        return seconds

    results: list[float] = []
    run(128)
    run(tokens)
    return {"seconds": results[0], "peak_mib": results[1]}


def measure(name: str, vocabulary: str, tokens: int, python: str) -> dict[str, Any]:
    """A case in a process of its own, with one thread; an error instead of figures where it does not run."""
    command = [python, "-m", "benchmarks.loss_memory", "--case", name, vocabulary, "--tokens", str(tokens)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="an interpreter that has the peers")
    parser.add_argument("--vocabularies", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--beside", nargs="+", default=["ours", "trl", "liger"], help="what to measure beside plain")
    parser.add_argument("--case", nargs=2, metavar=("WHOSE", "VOCABULARY"), help="one case, in this process")
    arguments = parser.parse_args()
    if arguments.case:
        whose, vocabulary = arguments.case
        print(json.dumps(case(whose, vocabulary, arguments.tokens)))
        return
    record: dict[str, Any] = {"tokens": arguments.tokens, "cases": {}}
    for vocabulary in arguments.vocabularies:
        found = {
            name: measure(
                name, vocabulary, arguments.tokens, arguments.peers if name in ("trl", "liger") else sys.executable
            )
            for name in ("plain", *arguments.beside)
        }
        record["cases"][vocabulary] = found
        for key, figure in (("peak_ratio", "peak_mib"), ("time_ratio", "seconds")):
            for name in arguments.beside:
                ratio = None if "error" in found[name] else found[name][figure] / found["plain"][figure]
                record.setdefault(key if name == "ours" else f"{name}_{key}", {})[vocabulary] = ratio
    if not arguments.json:
        print(json.dumps(record, indent=2))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
