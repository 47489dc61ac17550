"""Updates on fixed groups, under torchrun: `trainer_driver.py MODEL ZERO_STAGE MICRO_BATCH_TOKENS OUT GIVEN`.

One plain update; one from the checkpoint in the folder GIVEN, which the run makes itself where it is OUT's; one that
must be left out because a log-probability is NaN; then two batches of two updates with every option of the objective,
by a second trainer; then an adapter (`lora_driver.py`).
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common.config import Config
from common.trajectory import Group, Response, VersionRun
from learner import checkpoint, ranks, resuming
from learner.batch import build_step, split_groups
from learner.capture import RNG
from learner.checkpoint import State
from learner.critic import Critic
from learner.packing import Packed, plan
from learner.trainer import Trainer

OPTIONS = {
    "kl_coefficient": 0.1,
    "entropy_bonus": 0.01,
    "advantage": {"type": "gae", "value_clip": 0.2, "optimizer": {"lr": 1e-2}},
}


def learner(stage: int, tokens: int) -> dict[str, Any]:
    return {"dtype": "float32", "zero_stage": stage, "micro_batch_tokens": tokens, "groups_per_step": 4}


def config(model: str, stage: int, tokens: int, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "trainer"},
            "model": {"path": model},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 24},
            "learner": learner(stage, tokens),
            **sections,
        }
    )


def groups() -> list[Group]:
    """Four groups of four responses of 1 to 24 tokens, with log-probabilities far enough off that weights matter."""
    rng = np.random.default_rng(7)

    def response(reward: float) -> Response:
        tokens = int(rng.integers(1, 25))
        return Response(
            token_ids=rng.integers(0, 500, tokens).astype(np.int32),
            logprobs=rng.normal(-6, 0.5, tokens).astype(np.float32),
            versions=(VersionRun(0, 0),),
            finish_reason="stop",
            raw_reward=reward,
            reward=reward,
            correct=reward > 0,
        )

    return [
        Group(
            group_id=str(index),
            prompt_ids=rng.integers(0, 500, int(rng.integers(4, 16))).astype(np.int32),
            responses=tuple(response(float(rng.integers(0, 2)) + 0.1 * k) for k in range(4)),
            generator="g",
            temperature=1.0,
            sampled_at=0.0,
        )
        for index in range(4)
    ]


def all_weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.weights()])


def nonfinite(trainer: Trainer, packs: list[Packed]) -> dict[str, Any]:
    """An update with one NaN on one rank, and a good one after it."""
    before = all_weights(trainer)
    poisoned = list(packs)
    if dist.get_rank() == dist.get_world_size() - 1:
        poisoned[0] = replace(packs[0], behav_logp=np.full_like(packs[0].behav_logp, np.nan))
    result = trainer.update(poisoned, None, lr=1e-3)
    kept = torch.equal(before, all_weights(trainer))
    good = trainer.update(packs, None, lr=1e-3)
    moved = not torch.equal(before, all_weights(trainer))
    return {
        "skipped": result.nonfinite and kept and result.metrics.tokens == 0,
        "resumed": not good.nonfinite and moved and good.grad_norm > 0,
    }


@torch.no_grad()
def values(critic: Critic, pack: Packed) -> torch.Tensor:
    return critic.values(pack)


def save(trainer: Trainer, root: Path, version: int) -> None:
    copy = trainer.capture()
    if copy is not None:
        adapter = None if trainer.adapter is None else asdict(trainer.adapter)
        state = State(version, dist.get_world_size(), (), steps=copy.steps, adapter=adapter)
        checkpoint.save(root, state, copy.write, keep=2)
    dist.barrier()


def load(trainer: Trainer, root: Path) -> None:
    stored = resuming.choose([root], logging.getLogger("headrace"))
    assert stored is not None
    trainer.load(stored)


def written(root: Path) -> dict[str, str]:
    """Checksums of the newest checkpoint's tensors, but for the random generators, of which there is a row per rank."""
    folder = checkpoint.newest(root)
    assert folder is not None and not checkpoint.broken(folder)
    return {name: each.sha256 for name, each in checkpoint.files(folder).items() if name != RNG}


def resumed(settings: Config, packs: list[Packed], given: Path, own: Path) -> dict[str, Any]:
    """The checkpoint that one rank without ZeRO left in `given`, loaded here: what is saved of it again must be the
    same bytes. Then one more update."""
    trainer = Trainer(settings)
    load(trainer, given)
    save(trainer, own, 1)
    again = written(own) if dist.get_rank() == 0 else {}
    trainer.update(packs, None, lr=1e-3)
    save(trainer, own, 2)
    return {"again": again, "weights": all_weights(trainer).tolist()[::97]}


def with_options(settings: Config, folder: Path) -> list[dict[str, Any]]:
    """Metrics of every update; the reference is moved away from the policy first, so that its KL is not zero."""
    trainer = Trainer(settings)
    assert trainer.reference is not None and trainer.critic is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.reference.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    steps = [build_step(part, settings, policy_version=0) for part in split_groups(groups(), 2)]
    updates = [
        plan(step, dist.get_world_size(), settings.learner.micro_batch_tokens)[dist.get_rank()] for step in steps
    ]
    records = []
    for batch in (1, 2):
        for result in trainer.train(updates, batch):
            assert result.critic is not None
            records.append({**asdict(result.metrics), "grad_norm": result.grad_norm, **asdict(result.critic)})
    # What a checkpoint holds of the critic comes back.
    save(trainer, folder, 2)
    saved = values(trainer.critic, updates[0][0])
    trainer.train(updates, 3)
    moved = values(trainer.critic, updates[0][0])
    load(trainer, folder)
    loaded = values(trainer.critic, updates[0][0])
    records[-1]["restored"] = torch.equal(saved, loaded) and (len(saved) == 0 or not torch.equal(saved, moved))
    return records


def main() -> None:
    model, stage, tokens, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    given = Path(sys.argv[5])
    settings = config(model, stage, tokens)
    ranks.init("gloo")
    trainer = Trainer(settings)
    step = build_step(groups(), settings, policy_version=0)
    packs = plan(step, dist.get_world_size(), tokens)[dist.get_rank()]
    result = trainer.update(packs, None, lr=1e-3)
    weights = all_weights(trainer)
    if given == out.parent:
        save(trainer, given / "given", 1)
    loaded = resumed(settings, packs, given / "given", out.with_suffix(".own"))
    nan = nonfinite(trainer, packs)
    optional = []
    if stage in (1, 3) or dist.get_world_size() == 1:  # what the other stages do differently, the plain update shows
        two = {**learner(stage, tokens), "updates_per_batch": 2}
        optional = with_options(config(model, stage, tokens, objective=OPTIONS, learner=two), out.with_suffix(""))
    from lora_driver import with_adapter  # which imports this file

    adapter = with_adapter(model, stage, tokens, out, given)
    if dist.get_rank() == 0:
        np.save(out.with_suffix(".npy"), weights.numpy())
        record = {"grad_norm": result.grad_norm, "loss": result.metrics.loss, "tokens": result.metrics.tokens}
        record |= {"nonfinite": nan, "optional": optional, "resumed": loaded, "adapter": adapter}
        out.write_text(json.dumps({**record, "micro_batches": len(packs)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
