"""One DeepSpeed engine and one update through it, the same for policy and critic.

What it promises: the gradient of an update is that of the plain sum of its micro-batches' losses over all ranks; and no
non-finite loss or gradient reaches the weights, on any rank. For the second, a non-finite loss is made to give a
non-finite gradient, reduction carries that to every rank, and the norm decides. DeepSpeed itself leaves out a step
whose global norm is not finite under ZeRO-1 to 3, in bf16 and float32, and drops the gradients it holds (it has no call
for that); without ZeRO it would step, so there the norm is taken here, before the step. No further message is needed.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config import LearnerConfig, OptimizerConfig


def warmup_lr(optimizer: OptimizerConfig, step: int) -> float:
    """Linear warm-up to a constant learning rate; `step` counts batches, starting at 1."""
    return optimizer.lr * min(1.0, step / optimizer.warmup_steps) if optimizer.warmup_steps else optimizer.lr


def import_deepspeed() -> Any:
    # DeepSpeed picks its accelerator at import.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # DeepSpeed would compile its shared-memory all-reduce at the first start: minutes on two cores, and not every
    # machine has a compiler. Gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroEngine:
    """A model under DeepSpeed with AdamW; `module` is what to call for a forward pass."""

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, learner: LearnerConfig) -> None:
        deepspeed = import_deepspeed()
        self.stage = learner.zero_stage
        adamw = torch.optim.AdamW(
            model.parameters(), lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay
        )
        self.module: Any
        self.module, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": learner.zero_stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": optimizer.grad_clip,
                "bf16": {"enabled": learner.dtype == "bfloat16"},
                "steps_per_print": 10**9,
            },
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    def set_lr(self, lr: float) -> None:
        for group in self.module.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor, outputs: Tensor, last: bool) -> float | None:
        """Backward of one micro-batch's loss; after the `last` one of the update also the optimizer's step.

        Args:
            loss: a sum over the micro-batch's tokens.
            outputs: what the model gave for them, any shape, from which the loss was computed.
            last: whether the update ends with it.

        Returns:
            None before the last; then the gradient's norm before clipping, over all parameters and ranks, not finite
            where the step was left out.
        """
        self.module.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is a sum over them.
        loss = loss * dist.get_world_size()
        # A clamp stops the gradient of a NaN as it stops any other: of its own a NaN would not reach the weights' norm.
        poison = torch.where(loss.detach().isfinite(), 0.0, math.nan)
        self.module.backward(loss + poison * outputs.nan_to_num().sum(), scale_wrt_gas=False)
        if last:
            return self._step()
        self.module.step()
        return None

    def _step(self) -> float:
        if self.stage > 0:
            self.module.step()
            norm = self.module.get_global_grad_norm()
            return math.nan if not self.module.was_step_applied() else float(norm)
        # DeepSpeed reports no norm then; gradients are whole on every rank.
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))
        if math.isfinite(norm):
            self.module.step()
        else:
            self.module.zero_grad()
        return norm
