"""Updates by ranks that share rows: `sequence_driver.py MODEL FOLDER CASES`, CASES a JSON list of `Case`'s fields.

Imports once and forks the ranks of every case from itself, which take two batches of two updates (KL, entropy bonus,
GAE, rejection) and save; then, where the case says so, they load what another case has saved and save it again, as
FOLDER/<name>.again. Rank 0 leaves FOLDER/<name>.json and the checkpoint FOLDER/<name>.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trainer_driver import OPTIONS, config, groups, learner, load, save

from learner.batch import build_step, split_groups
from learner.models import policy_model
from learner.packing import plan
from learner.startup import import_all
from learner.trainer import Trainer


@dataclass(frozen=True)
class Case:
    """`together` of `ranks` ranks share rows of at most `tokens` tokens; `options`: of the learner's section."""

    name: str
    ranks: int
    together: int
    stage: int
    tokens: int
    options: dict[str, Any]
    given: str | None = None


def take(case: Case, model: str, folder: Path) -> dict[str, Any]:
    lora = "lora" in case.options
    objective = {"correction": {"mode": "decoupled", "token_mask": [0.0, 5.0], "level": "sequence"}, **OPTIONS}
    objective["advantage"] = {**OPTIONS["advantage"], "optimizer": {"lr": 1e-3, "warmup_steps": 0}}
    settings = config(
        model, case.stage, case.tokens,
        objective={"kl_coefficient": 0.1, "correction": objective["correction"]} if lora else objective,
        learner={
            **learner(case.stage, case.tokens // case.together), "ranks": case.ranks, "updates_per_batch": 2,
            "sequence_parallel": case.together, "optimizer": {"lr": 1e-3, "warmup_steps": 0}, **case.options,
        },
    )  # fmt: skip
    trainer = Trainer(settings)
    steps = [build_step(part, settings, policy_version=0) for part in split_groups(groups(), 2)]
    plans = [plan(step, case.ranks // case.together, settings.learner.row_tokens) for step in steps]
    updates = [rows[dist.get_rank() // case.together] for rows in plans]
    results = [result for batch in (1, 2) for result in trainer.train(updates, batch)]
    save(trainer, folder / case.name, 1)
    if case.given is not None:
        load(trainer, folder / case.given)
        save(trainer, folder / f"{case.name}.again", 1)
    return {
        "row_tokens": [len(row.input_ids) for row in updates[0]],
        "updates": [
            asdict(result.metrics) | {"grad_norm": result.grad_norm} | (asdict(result.critic) if result.critic else {})
            for result in results
        ],
    }


def rank(case: Case, number: int, model: str, folder: Path) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(case.ranks))
    store = f"file://{folder / case.name}.store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=case.ranks)
    record = take(case, model, folder)
    if number == 0:
        (folder / f"{case.name}.json").write_text(json.dumps(record))
    dist.barrier()


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    import_all()
    policy_model(config(model, 1, 512))  # which imports more
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  as DeepSpeed does for every optimizer, in seconds
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # DeepSpeed asks for them and uses the group there is
    for case in (Case(**fields) for fields in json.loads(sys.argv[3])):
        children = []
        for number in range(case.ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    rank(case, number, model, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{case.name}: ranks ended with {codes}")


if __name__ == "__main__":
    main()
