"""`trainer_driver.py` with an adapter: updates with a KL term, a checkpoint, and a second trainer that resumes from the
one that a single rank without ZeRO has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from trainer_driver import config, groups, learner, load, save, written

from common.lora import A, B, merged, pairs
from learner import lora
from learner.batch import build_step
from learner.packing import plan
from learner.trainer import Trainer

LORA = {"rank": 4, "alpha": 8}


def kept(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def base_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What is frozen, by its Hugging Face name."""
    named = lora.whole(trainer.engine.module)
    return kept(trainer._whole((name, parameters[:1]) for name, parameters in named))


def with_adapter(model: str, stage: int, tokens: int, out: Path, given: Path) -> dict[str, Any]:
    """Checks and figures. OUT.npz gets the merged weights before saving and the log-probabilities after loading."""
    settings = config(
        model, stage, tokens, objective={"kl_coefficient": 0.1},
        learner={**learner(stage, tokens), "lora": LORA, "optimizer": {"lr": 1e-2}},
    )  # fmt: skip
    trainer = Trainer(settings)
    assert trainer.adapter is not None and trainer.reference is None
    packs = plan(build_step(groups(), settings, 0), dist.get_world_size(), tokens)[dist.get_rank()]
    before, at_start = base_of(trainer), torch.cat(trainer.score(packs))
    results = [trainer.train([packs], step)[0] for step in (1, 2, 3)]
    reference, policy = torch.cat(trainer.score_reference(packs)), torch.cat(trainer.score(packs))
    whole, sent = kept(trainer.weights()), kept(trainer.published())
    record: dict[str, Any] = {
        "base kept": all(tensor.equal(before[name]) for name, tensor in base_of(trainer).items()),
        "reference is the start": torch.allclose(reference, at_start, atol=1e-6),
        "policy moved": len(policy) == 0 or bool((policy - at_start).abs().max() > 1e-2),
        "only factors sent": all(name.endswith((A, B)) for name in sent),
        "sent makes whole": all(
            whole[name].equal(merged(before[name], a, b, trainer.adapter.scale)) for name, (a, b) in pairs(sent).items()
        ),
    }
    if given == out.parent:
        save(trainer, given / "adapter", 1)
    again = Trainer(settings)
    load(again, given / "adapter")
    loaded = torch.cat(again.score(packs))
    own = out.with_suffix(".adapter")
    save(again, own, 1)
    record["again"] = written(own) if dist.get_rank() == 0 else {}
    result = again.train([packs], 4)[0]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, loaded)
    np.savez(
        out.with_suffix(f".rank{dist.get_rank()}.npz"),
        loaded=torch.cat(every).sort().values.numpy(),
        **{f"whole/{name}": tensor.float().numpy() for name, tensor in whole.items()},
    )
    record["grad_norm"] = [each.grad_norm for each in (*results, result)]
    record["kl"] = [each.metrics.kl_reference for each in (*results, result)]
    return record
