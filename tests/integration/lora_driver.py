"""Updates of an adapter on fixed groups, under torchrun: `lora_driver.py MODEL ZERO_STAGE MICRO_BATCH_TOKENS OUT GIVEN`.

As `trainer_driver.py`, in short: two updates with a KL term, a checkpoint where GIVEN is OUT's folder; then a second
trainer, which loads the checkpoint in GIVEN, saves it again and makes one more update.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from trainer_driver import config, groups, learner, load, save, written

from common.lora import A, B, merged, pairs
from learner import lora, ranks
from learner.batch import build_step
from learner.packing import Packed, plan
from learner.trainer import Trainer


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def scores(trainer: Trainer, packs: list[Packed]) -> torch.Tensor:
    return torch.cat(trainer.score(packs))


def base_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What is frozen, by its Hugging Face name."""
    named = trainer._whole((name, parameters[:1]) for name, parameters in lora.whole(trainer.engine.module))
    return {name: tensor.clone() for name, tensor in named}


def main() -> None:
    model, stage, tokens, out, given = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    settings = config(
        model, stage, tokens, objective={"kl_coefficient": 0.1},
        learner={**learner(stage, tokens), "lora": {"rank": 4, "alpha": 8, "dropout": 0.0}},
    )  # fmt: skip
    ranks.init("gloo")
    trainer = Trainer(settings)
    assert trainer.adapter is not None and trainer.reference is None
    packs = plan(build_step(groups(), settings, 0), dist.get_world_size(), tokens)[dist.get_rank()]
    before, at_start = base_of(trainer), scores(trainer, packs)
    results = [trainer.train([packs], step)[0] for step in (1, 2)]
    for _ in range(3):  # B starts at zero: until it has moved, A's gradient is nothing but rounding
        trainer.update(packs, trainer.score(packs), lr=1e-2, reference=trainer.score_reference(packs))
    reference = torch.cat(trainer.score_reference(packs))
    policy = scores(trainer, packs)
    whole, sent = tensors(trainer), {name: tensor.clone() for name, tensor in trainer.published()}
    checks = {
        "base kept": all(tensor.equal(before[name]) for name, tensor in base_of(trainer).items()),
        "reference is the start": torch.allclose(reference, at_start, atol=1e-6),
        "policy moved": len(policy) == 0 or bool((policy - at_start).abs().max() > 1e-2),
        "only factors sent": all(name.endswith((A, B)) for name in sent),
        "sent makes whole": all(
            whole[name].equal(merged(before[name], a, b, trainer.adapter.scale)) for name, (a, b) in pairs(sent).items()
        ),
        "trained": sum(p.numel() for p in trainer.engine.module.parameters() if p.requires_grad) if stage < 3 else 0,
    }
    if Path(given) == out.parent:
        save(trainer, Path(given) / "given", 1)
    again = Trainer(settings)
    load(again, Path(given) / "given")
    loaded = torch.cat(again.score(packs))
    save(again, out.with_suffix(".own"), 1)
    resaved = written(out.with_suffix(".own")) if dist.get_rank() == 0 else {}
    again.update(packs, again.score(packs), lr=1e-3, reference=again.score_reference(packs))
    resumed = torch.cat([tensor.flatten() for tensor in tensors(again).values()])
    every = [torch.empty(0)] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(loaded, every)
    if dist.get_rank() == 0:
        assert every is not None
        np.savez(
            out.with_suffix(".npz"), resumed=resumed.numpy(), loaded=torch.cat(every).sort().values.numpy(),
            **{f"whole/{name}": tensor.numpy() for name, tensor in whole.items()},
        )  # fmt: skip
        norms = [result.grad_norm for result in results]
        kl = [result.metrics.kl_reference for result in results]
        out.write_text(json.dumps({**checks, "grad_norm": norms, "kl": kl, "again": resaved}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
