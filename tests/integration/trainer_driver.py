"""One optimizer update on fixed groups, under torchrun: `trainer_driver.py MODEL ZERO_STAGE MICRO_BATCH_TOKENS OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.config import Config
from common.trajectory import Group, Response, VersionRun
from learner import ranks
from learner.batch import build_step
from learner.packing import plan
from learner.trainer import Trainer


def config(model: str, stage: int, tokens: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "trainer"},
            "model": {"path": model},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 24},
            "learner": {"dtype": "float32", "zero_stage": stage, "micro_batch_tokens": tokens, "groups_per_step": 4},
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


def main() -> None:
    model, stage, tokens, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    settings = config(model, stage, tokens)
    ranks.init("gloo")
    trainer = Trainer(settings)
    step = build_step(groups(), settings, policy_version=0)
    packs = plan(step, dist.get_world_size(), tokens)[dist.get_rank()]
    result = trainer.update(packs, None, lr=1e-3)
    weights = torch.cat([tensor.flatten().clone() for _, tensor in trainer.weights()])
    if dist.get_rank() == 0:
        np.save(out.with_suffix(".npy"), weights.numpy())
        record = {"grad_norm": result.grad_norm, "loss": result.metrics.loss, "tokens": result.metrics.tokens}
        out.write_text(json.dumps({**record, "micro_batches": len(packs)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
