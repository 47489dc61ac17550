"""The DeepSpeed side of the learner: a model, its optimizer, and one optimizer update over packed micro-batches.

Runs on every rank. What it promises: the gradient of an update is that of the whole mini-batch, however it was cut into
micro-batches and ranks (architecture, invariant 10). For that the loss of a token arrives already divided by the
mini-batch's one N, DeepSpeed is kept from dividing by accumulation steps, and its mean over ranks is undone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from common.config import Config, OptimizerConfig
from learner.batch import sequence_scale
from learner.logprobs import check_packable, float32_head, packed_logprobs
from learner.objective import Tokens, policy_loss, rejection_mask
from learner.objective_metrics import Metrics, MetricSums
from learner.packing import Packed, surviving_tokens


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update, over all ranks."""

    metrics: Metrics
    grad_norm: float
    lr: float
    seconds: float


def warmup_lr(optimizer: OptimizerConfig, step: int) -> float:
    """Linear warm-up to a constant learning rate; `step` counts batches, starting at 1."""
    return optimizer.lr * min(1.0, step / optimizer.warmup_steps) if optimizer.warmup_steps else optimizer.lr


class Trainer:
    """Model and optimizer of this rank."""

    def __init__(self, config: Config) -> None:
        # DeepSpeed picks its accelerator at import.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # DeepSpeed would compile its shared-memory all-reduce at the first start: minutes on two cores, and not every
        # machine has a compiler. Gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.config = config
        torch.manual_seed(config.run.seed)
        learner = config.learner
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, learner.dtype),
            attn_implementation="sdpa",  # takes the block mask of a packed row
            trust_remote_code=config.model.trust_remote_code,
        )
        check_packable(model.config, config.sampling.max_prompt_tokens + config.sampling.max_response_tokens)
        if learner.dtype != "float32":
            float32_head(model)
        model.train()
        if learner.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        adamw = torch.optim.AdamW(
            model.parameters(),
            lr=learner.optimizer.lr,
            betas=learner.optimizer.betas,
            weight_decay=learner.optimizer.weight_decay,
        )
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=self._deepspeed_config())
        self.device = self.engine.device

    def _deepspeed_config(self) -> dict[str, Any]:
        learner = self.config.learner
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": learner.zero_stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": learner.optimizer.grad_clip,
            "bf16": {"enabled": learner.dtype == "bfloat16"},
            "steps_per_print": 10**9,
        }

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether the proximal policy must be scored before the first update: with one update per batch it equals the
        current policy, unless masking by its ratio has to be known before N is counted."""
        correction = self.config.objective.correction
        masks = correction.token_mask is not None or correction.sequence_mask is not None
        return correction.mode != "bypass" and (self.config.learner.updates_per_batch > 1 or masks)

    @torch.no_grad()
    def score(self, packs: Sequence[Packed]) -> list[torch.Tensor]:
        """Log-probabilities of the response tokens under the current weights: one (R,) tensor per pack, nats."""
        return [packed_logprobs(self.engine, pack, self.config.sampling.temperature)[0] for pack in packs]

    def update(self, packs: Sequence[Packed], prox: Sequence[torch.Tensor] | None, lr: float) -> UpdateResult:
        """One optimizer update. Every rank calls it with equally many packs (empty ones take part in collectives).

        Where rejection leaves no token the weights stay as they are; the result then counts 0 tokens.
        """
        started = time.monotonic()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        sums, norm = MetricSums.zero(self.device), 0.0
        # None: rejection left no token. No step then: Adam would move the weights on a gradient of zero.
        counted = self._counted(packs, prox) or []
        packs = packs if counted else []
        for index, (pack, (mask, scale)) in enumerate(zip(packs, counted, strict=True)):
            self.engine.set_gradient_accumulation_boundary(index == len(packs) - 1)
            logp, entropy = packed_logprobs(self.engine, pack, self.config.sampling.temperature)
            tokens = Tokens(
                logp=logp,
                prox_logp=prox[index] if prox else logp.detach(),
                behav_logp=self._tensor(pack.behav_logp).to(logp.dtype),
                advantage=self._tensor(pack.advantage).to(logp.dtype),
                mask=mask,
                sequence_index=self._tensor(pack.sequence_index).long(),
                scale=scale.to(logp.dtype),
                entropy=entropy,
            )
            result = policy_loss(tokens, self.config.objective)
            # DeepSpeed averages gradients over ranks; the loss is a sum over them.
            self.engine.backward(result.loss * dist.get_world_size(), scale_wrt_gas=False)
            sums = sums + result.sums
            if index == len(packs) - 1:
                norm = self._finish_step()
            else:
                self.engine.step()
        dist.all_reduce(sums.added)
        dist.all_reduce(sums.peaks, op=dist.ReduceOp.MAX)
        return UpdateResult(
            metrics=sums.finish(self.config.objective.correction.cap),
            grad_norm=norm,
            lr=lr,
            seconds=time.monotonic() - started,
        )

    def _finish_step(self) -> float:
        """The optimizer's step; returns the gradient's norm before clipping, over all parameters and ranks."""
        norm = 0.0
        if self.config.learner.zero_stage == 0:  # DeepSpeed reports none then; gradients are whole on every rank
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        self.engine.step()
        return norm or float(self.engine.get_global_grad_norm() or 0.0)

    def _counted(
        self, packs: Sequence[Packed], prox: Sequence[torch.Tensor] | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Mask and scale of every pack's tokens; what rejection masks leaves N, over all ranks. None: N is 0."""
        correction = self.config.objective.correction
        if prox is None or (correction.token_mask is None and correction.sequence_mask is None):
            return [(self._tensor(pack.mask), self._tensor(pack.scale)) for pack in packs]
        masks = [
            rejection_mask(
                scored,
                self._tensor(pack.behav_logp),
                self._tensor(pack.mask),
                self._tensor(pack.sequence_index).long(),
                correction,
            )
            for pack, scored in zip(packs, prox, strict=True)
        ]
        tokens = self._tensor(surviving_tokens(packs, [mask.cpu().numpy() for mask in masks]))
        dist.all_reduce(tokens)
        if not tokens.any():
            return None
        scale = self._tensor(
            sequence_scale(tokens.cpu().numpy(), packs[0].prompt_of_sequence, self.config.objective.aggregation)
        )
        return [
            (mask, scale[self._tensor(pack.sequence_index).long()]) for pack, mask in zip(packs, masks, strict=True)
        ]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights under their Hugging Face names, tied ones once. Under ZeRO-3 every rank must iterate."""
        import deepspeed

        for name, parameter in self.engine.module.named_parameters():
            if self.config.learner.zero_stage == 3:
                with deepspeed.zero.GatheredParameters([parameter]):
                    yield name, parameter.detach()
            else:
                yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """Write `model/` and `deepspeed/` into `folder`. Every rank takes part."""
        self.engine.save_checkpoint(str(folder / "deepspeed"), tag="state")
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}
        if dist.get_rank() == 0:
            self.engine.module.save_pretrained(folder / "model", state_dict=state)
            self.tokenizer.save_pretrained(folder / "model")
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, at the same number of ranks."""
        self.engine.load_checkpoint(str(folder / "deepspeed"), tag="state")

