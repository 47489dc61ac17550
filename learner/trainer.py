"""The learner's side of a batch: the policy, what is scored before its updates, and one optimizer update over packed
micro-batches.

Runs on every rank; ranks that share rows (`learner.sequence`) are given the same packs and compute the same losses.
What it promises: the gradient of an update is that of the whole mini-batch, however it was cut into micro-batches and
ranks (architecture, invariant 10), for which the loss of a token arrives already divided by the mini-batch's one N (see
also `learner.zero`); and what is optional (a proximal pass, a reference, a critic) is not there unless the objective
asks for it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from common.config import Config, GaeAdvantage
from common.lora import Adapter
from common.weightwire import resolve_backend
from learner import capture, lora
from learner.batch import sequence_scale
from learner.capture import Capture, Stored
from learner.critic import Critic, CriticMetrics
from learner.fragments import Fragments
from learner.logprobs import packed_logprobs
from learner.models import policy_model, reference_model
from learner.objective import Tokens, interpolated_proximal, policy_loss, rejection_mask
from learner.objective_metrics import Metrics, MetricSums
from learner.packing import Packed, surviving_tokens
from learner.sequence import Sharing
from learner.utilisation import Work
from learner.zero import ZeroEngine, warmup_lr


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer update, over all ranks.

    `nonfinite`: loss or gradient were not finite and the weights stayed as they were; metrics and norm are then zero.
    """

    metrics: Metrics
    grad_norm: float
    lr: float
    seconds: float
    nonfinite: bool = False
    critic: CriticMetrics | None = None


class Trainer:
    """Model and optimizer of this rank.

    Attributes:
        adapter: with `learner.lora`; None: the whole model is trained.
        work: what the policy computes; None: not known.
    """

    def __init__(self, config: Config) -> None:
        from transformers import AutoTokenizer

        self.config = config
        torch.manual_seed(config.run.seed)
        model, self.adapter = policy_model(config)
        self.tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self.work = Work.of(model, trained=self.adapter is None)
        self.policy = ZeroEngine(model, config.learner.optimizer, config.learner)
        self.engine, self.device = self.policy.module, self.policy.device
        self.sharing = Sharing.join(config.learner.sequence_parallel)
        objective = config.objective
        self.reference: nn.Module | None = None
        # An adapter's own base is the reference without a copy of it.
        if objective.kl_coefficient > 0 and (self.adapter is None or objective.reference is not None):
            self.reference = reference_model(config, model, self.device)
        self.critic: Critic | None = None
        if isinstance(objective.advantage, GaeAdvantage):
            self.critic = Critic(config, objective.advantage, self.sharing)

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether the proximal policy must be scored before the first update: with one update per batch it equals the
        current policy, unless masking by its ratio has to be known before N is counted."""
        correction = self.config.objective.correction
        if correction.proximal == "interpolated":
            return False
        masks = correction.token_mask is not None or correction.sequence_mask is not None
        return correction.mode != "bypass" and (self.config.learner.updates_per_batch > 1 or masks)

    def train(self, updates: Sequence[Sequence[Packed]], step: int) -> list[UpdateResult]:
        """All optimizer updates of one batch on this rank's packs, a list per update; `step` counts batches, from 1.

        What is needed of the weights before the batch is computed before the first update: the log-probabilities under
        the proximal policy and the reference, and the critic's values.
        """
        judged = self.critic.judge(updates) if self.critic else None
        if judged is not None:
            updates = [one.packs for one in judged]
        prox = [self.score(packs) for packs in updates] if self.needs_proximal_pass else None
        reference = [self.score_reference(packs) for packs in updates] if self.config.objective.kl_coefficient else None
        lr = warmup_lr(self.config.learner.optimizer, step)
        results = []
        for index, packs in enumerate(updates):
            result = self.update(
                packs, prox[index] if prox else None, lr, reference[index] if reference else None
            )
            if self.critic is not None and judged is not None:
                started = time.monotonic()
                critic = self.critic.update(judged[index], step)
                result = replace(result, critic=critic, seconds=result.seconds + time.monotonic() - started)
            results.append(result)
        return results

    @torch.no_grad()
    def score(self, packs: Sequence[Packed], model: nn.Module | None = None) -> list[torch.Tensor]:
        """Log-probabilities of the response tokens under the policy's current weights, or another model's: one (R,)
        tensor per pack, nats."""
        model = self.engine if model is None else model
        with nullcontext() if self.adapter is None else lora.without_dropout(model):
            temperature = self.config.sampling.temperature
            return [packed_logprobs(model, pack, temperature, sharing=self.sharing)[0] for pack in packs]

    def score_reference(self, packs: Sequence[Packed]) -> list[torch.Tensor]:
        """The same under the reference: a model of its own, or the policy without its adapter."""
        if self.reference is not None:
            return self.score(packs, self.reference)
        with lora.disabled(self.engine.module):
            return self.score(packs)

    def update(
        self,
        packs: Sequence[Packed],
        prox: Sequence[torch.Tensor] | None,
        lr: float,
        reference: Sequence[torch.Tensor] | None = None,
    ) -> UpdateResult:
        """One optimizer update. Every rank calls it with equally many packs (empty ones take part in collectives).

        Where rejection leaves no token, or loss or gradient are not finite, the weights stay as they are; the result
        then counts 0 tokens.
        """
        started = time.monotonic()
        self.policy.set_lr(lr)
        objective = self.config.objective
        sums, norm = MetricSums.zero(self.device), 0.0
        # Empty where rejection left no token. No step then: Adam would move the weights on a gradient of zero.
        counted = self._counted(packs, prox)
        for index, (mask, scale) in enumerate(counted):
            logp, entropy = packed_logprobs(
                self.engine,
                packs[index],
                self.config.sampling.temperature,
                entropy_gradient=objective.entropy_bonus > 0,
                sharing=self.sharing,
            )
            tokens = self._tokens(packs[index], logp, entropy, mask, scale, prox[index] if prox else None)
            result = policy_loss(tokens, objective, reference[index] if reference else None)
            if self.sharing.leads:
                sums = sums + result.sums
            norm = self.policy.backward(result.loss, logp, last=index == len(counted) - 1) or 0.0
        if nonfinite := not math.isfinite(norm):
            sums, norm = MetricSums.zero(self.device), 0.0
        dist.all_reduce(sums.added)
        dist.all_reduce(sums.peaks, op=dist.ReduceOp.MAX)
        return UpdateResult(
            metrics=sums.finish(objective.correction.cap),
            grad_norm=norm,
            lr=lr,
            seconds=time.monotonic() - started,
            nonfinite=nonfinite,
        )

    def _tokens(
        self,
        pack: Packed,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        mask: torch.Tensor,
        scale: torch.Tensor,
        prox: torch.Tensor | None,
    ) -> Tokens:
        behav = self._tensor(pack.behav_logp).to(logp.dtype)
        if prox is None:
            prox = logp.detach()
            if self.config.objective.correction.proximal == "interpolated":
                prox = interpolated_proximal(logp, behav, self._tensor(pack.staleness))
        return Tokens(
            logp=logp,
            prox_logp=prox,
            behav_logp=behav,
            advantage=self._tensor(pack.advantage).to(logp.dtype),
            mask=mask,
            sequence_index=self._tensor(pack.sequence_index).long(),
            scale=scale.to(logp.dtype),
            entropy=entropy,
        )

    def _counted(
        self, packs: Sequence[Packed], prox: Sequence[torch.Tensor] | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mask and scale of every pack's tokens; what rejection masks leaves N, over all ranks. Empty: N is 0."""
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
        if not self.sharing.leads:
            tokens.zero_()
        dist.all_reduce(tokens)
        if not tokens.any():
            return []
        scale = self._tensor(
            sequence_scale(tokens.cpu().numpy(), packs[0].prompt_of_sequence, self.config.objective.aggregation)
        )
        return [
            (mask, scale[self._tensor(pack.sequence_index).long()]) for pack, mask in zip(packs, masks, strict=True)
        ]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    @property
    def sends(self) -> Adapter | None:
        """What is published in the place of whole weights; None: whole ones, since vLLM's own nccl engine loads what
        it receives."""
        return None if resolve_backend(self.config.weights.backend) == "nccl" else self.adapter

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What generators are sent: an adapter's factors where there is one (see `sends`), else `weights`."""
        return self.weights() if self.sends is None else self._whole(lora.wire(self.engine.module))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights under their Hugging Face names, tied ones once, an adapter added. Under ZeRO-3 every rank must
        iterate."""
        return self._whole(lora.whole(self.engine.module))

    def _whole(self, named: Iterator[tuple[str, list[Any]]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that the named parameters make up, one after the other."""
        import deepspeed

        scale = 0.0 if self.adapter is None else self.adapter.scale
        for name, parameters in named:
            if self.config.learner.zero_stage == 3:
                with deepspeed.zero.GatheredParameters(parameters):
                    yield name, lora.sum_of(parameters, scale)
            else:
                yield name, lora.sum_of(parameters, scale)

    def capture(self) -> Capture | None:
        """A copy of everything a checkpoint holds, in host memory, on rank 0; None on the others. Every rank takes
        part."""
        return capture.capture(self._fragments(), self._texts)

    def load(self, stored: Stored) -> None:
        """Weights, optimizers and random generators of a checkpoint, whatever number of ranks and ZeRO stage wrote it.
        Every rank takes part.

        Raises:
            ConfigError: it was made for another model or with another adapter, or there is a critic and it was made
                without.
        """
        fragments = self._fragments()
        stored.check(fragments, self.adapter)
        stored.load(fragments, self.config.run.seed)

    def _fragments(self) -> dict[str, Fragments]:
        engines = {capture.POLICY if self.adapter is None else capture.ADAPTER: self.policy}
        if self.critic is not None:
            engines[capture.CRITIC] = self.critic.engine
        return {name: Fragments(engine.module, engine.stage) for name, engine in engines.items()}

    @cached_property
    def _texts(self) -> dict[str, bytes]:
        """Config and tokenizer, which do not change."""
        if dist.get_rank() != 0:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            if self.config.learner.lora is not None:
                lora.write_config(self.config.learner.lora, self.config.model.path, Path(folder))
                return capture.small_files(Path(folder), lora.FOLDER)
            self.engine.module.config.save_pretrained(folder)
            if self.engine.module.can_generate():
                self.engine.module.generation_config.save_pretrained(folder)
            return capture.small_files(Path(folder), "model")
