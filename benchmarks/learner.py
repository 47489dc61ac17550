"""An optimizer step of the learner beside that of TRL's GRPOTrainer: the same sequences, weights, type and threads.

    python -m benchmarks.learner [--json] [--peers PYTHON] [--model FOLDER]

4 groups of 8 responses (8 to 32 tokens) to prompts of 46 to 54 tokens, the quickstart's shape, float32, one thread.
Forward, loss, backward, clipping and AdamW, by each in a process of its own; the steps take turns, so that other work
on the machine hits both alike, and processor time is what counts. `ours_tokens_per_s` and `trl_tokens_per_s` count
response tokens trained, `ratio` is the one over the other (medians); `unshared_ratio` is that of our step with every
prompt computed for each of its responses; `grad_norms`, of the first steps, must agree. TRL is imported by the
interpreter `--peers` (it is no dependency), and null with a reason where it does not run.
The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.trajectory import Group, Response, VersionRun
from learner.batch import Step, build_step

ROOT = Path(__file__).resolve().parent.parent
GROUPS, GROUP, LR = 4, 8, 1e-6


def settings(model: str, tokens: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "benchmark"},
            "model": {"path": model},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": GROUP, "max_prompt_tokens": 64, "max_response_tokens": 64},
            # ratio 1 and no weight, as TRL's first step on a batch
            "objective": {"correction": {"mode": "none"}},
            "learner": {"dtype": "float32", "micro_batch_tokens": tokens, "groups_per_step": GROUPS},
        }
    )


def make_groups(vocabulary: int) -> list[Group]:
    rng, shape = np.random.default_rng(0), np.random.default_rng(1)  # lengths do not depend on the vocabulary

    def response() -> Response:
        tokens, reward = int(shape.integers(8, 33)), float(shape.random())
        ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
        return Response(ids, np.full(tokens, -1, np.float32), (VersionRun(0, 0),), "stop", reward, reward, True)

    return [
        Group(
            group_id=str(index),
            prompt_ids=rng.integers(0, vocabulary, int(shape.integers(46, 55))).astype(np.int32),
            responses=tuple(response() for _ in range(GROUP)),
            generator="g",
            temperature=1.0,
            sampled_at=0.0,
        )
        for index in range(GROUPS)
    ]


def unshared(step: Step) -> Step:
    """The same sequences, each a group of its own."""
    alone = [
        replace(group, group_id=f"{group.group_id}-{sequence.index}", sequences=(sequence,))
        for group in step.groups
        for sequence in group.sequences
    ]
    return replace(step, groups=tuple(alone))


def ours(model: str, shared: bool) -> Callable[[], float]:
    """One update by the real trainer: a call takes a step and returns the gradient's norm."""
    from learner import ranks
    from learner.packing import plan
    from learner.trainer import Trainer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    config = settings(model, 512)
    ranks.init("gloo")
    trainer = Trainer(config)
    step = build_step(make_groups(trainer.tokenizer.vocab_size), config, 0)
    packs = plan(step if shared else unshared(step), 1, config.learner.micro_batch_tokens)[0]
    return lambda: trainer.update(packs, None, LR).grad_norm


def trl(model: str, folder: str) -> Callable[[], float]:
    """The step inside GRPOTrainer.train, without generation: batches are handed to it, as tensors, ready scored."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(model)
    step = build_step(make_groups(tokenizer.vocab_size), settings(model, 512), 0)
    rows = [(group.prompt_ids, sequence) for group in step.groups for sequence in group.sequences]

    def padded(arrays: list[Any], left: bool) -> tuple[Any, Any]:
        width = max(map(len, arrays))
        ids, mask = np.full((len(arrays), width), tokenizer.pad_token_id), np.zeros((len(arrays), width), int)
        for row, array in enumerate(arrays):
            at = slice(width - len(array), None) if left else slice(len(array))
            ids[row, at], mask[row, at] = array, 1
        return torch.tensor(ids), torch.tensor(mask)

    prompts, completions = padded([p for p, _ in rows], True), padded([s.token_ids for _, s in rows], False)
    batch = {
        "prompt_ids": prompts[0], "prompt_mask": prompts[1], "completion_ids": completions[0],
        "completion_mask": completions[1], "num_items_in_batch": completions[1].sum(),
        "advantages": torch.tensor([sequence.advantage for _, sequence in rows], dtype=torch.float32),
    }  # fmt: skip

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, _: Any) -> Any:
            return batch

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            self.started = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds = time.process_time() - self.started

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **__: Any) -> None:
            if logs and "grad_norm" in logs:
                print(json.dumps([self.seconds, float(logs["grad_norm"])]), flush=True)

    arguments = GRPOConfig(
        output_dir=folder, max_steps=1000, learning_rate=LR, lr_scheduler_type="constant", num_generations=GROUP,
        per_device_train_batch_size=GROUPS * GROUP, max_completion_length=64, logging_steps=1, beta=0.0, bf16=False,
        use_cpu=True, gradient_checkpointing=False, report_to=[], save_strategy="no", loss_type="dapo",
        max_grad_norm=1.0, disable_tqdm=True, weight_decay=0.1, adam_beta2=0.999,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["x"] * 64})
    trainer = Given(
        model=model, reward_funcs=lambda **_: [], args=arguments, train_dataset=data, processing_class=tokenizer,
        callbacks=[Turns()],
    )  # fmt: skip
    print("ready", flush=True)
    trainer.train()
    raise AssertionError("the parent ends this process")


def serve(whose: str, model: str) -> None:
    """A step for every line on standard input; its seconds of processor time and the gradient's norm, as a line."""
    if whose == "trl":
        with tempfile.TemporaryDirectory() as folder:
            trl(model, folder)
    take = ours(model, whose == "shared")
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        norm = take()
        print(json.dumps([time.process_time() - started, norm]), flush=True)


class Contestant:
    """A process that takes a step when told to."""

    def __init__(self, whose: str, model: str, python: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.learner", "--serve", whose, "--model", model],
            cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self.error: str | None = None
        self._answer("ready")

    def _answer(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        self._errors.seek(0)
        self.error = (self._errors.read().strip().splitlines() or ["ended"])[-1]
        return ""

    def step(self) -> tuple[float, float] | None:
        if self.error:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._answer("[")
        if not line:
            return None
        seconds, norm = json.loads(line)
        return seconds, norm

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=3, help="measured ones, after one to warm up")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model)
        return
    names = ("shared", "unshared", "trl")
    contestants = {
        name: Contestant(name, arguments.model, arguments.peers if name == "trl" else sys.executable) for name in names
    }
    taken = [{name: each.step() for name, each in contestants.items()} for _ in range(arguments.steps + 1)]
    for each in contestants.values():
        each.close()
    seconds = {
        name: None if each.error else statistics.median(step[name][0] for step in taken[1:])  # type: ignore[index]
        for name, each in contestants.items()
    }
    tokens = sum(len(response.token_ids) for group in make_groups(2) for response in group.responses)
    rates = {name: None if value is None else tokens / value for name, value in seconds.items()}
    record = {
        "ours_tokens_per_s": rates["shared"],
        "unshared_tokens_per_s": rates["unshared"],
        "trl_tokens_per_s": rates["trl"],
        "ratio": rates["shared"] / rates["trl"] if rates["shared"] and rates["trl"] else None,
        "unshared_ratio": rates["unshared"] / rates["trl"] if rates["unshared"] and rates["trl"] else None,
        "grad_norms": {name: None if figures is None else figures[1] for name, figures in taken[0].items()},
        "response_tokens": tokens,
        "errors": {name: each.error for name, each in contestants.items() if each.error},
    }
    if not arguments.json:
        print(json.dumps(record, indent=2))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
