"""Log-probabilities, balance and learning rate against the peers' numbers."""

from __future__ import annotations

import torch
from golden_cases import Case, assert_close, golden

from common.config import OptimizerConfig
from learner.logprobs import token_logprobs
from learner.packing import assign
from learner.trainer import warmup_lr


@golden("logprob_entropy_temperature")
def test_logprobs_at_temperature_equal_peer(case: Case) -> None:
    logits = torch.tensor(case.inputs["logits"], dtype=torch.float64).flatten(0, 1)
    targets = torch.tensor(case.inputs["labels"]).flatten()
    for temperature in case.inputs["temperatures"]:
        outputs = case.outputs[f"T={temperature}"]
        logp, entropy = token_logprobs(logits, targets, temperature, chunk=3)
        assert_close(logp.reshape(len(outputs["logprob"]), -1), outputs["logprob"])
        assert_close(entropy.reshape(len(outputs["entropy"]), -1), outputs["entropy"])


@golden("seqlen_balance")
def test_balance_no_worse_than_peer_and_within_limit(case: Case) -> None:
    """Partitions are not compared, as they may differ. Unlike the peer's, ours never exceed the token limit."""
    sizes, limit = case.inputs["seqlens"], case.inputs["max_token_len"]

    def sums(lock_steps: list[list[list[int]]], lengths: list[int]) -> list[int]:
        bins = [items for lock_step in lock_steps for items in lock_step]
        assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
        return [sum(lengths[item] for item in items) for items in bins]

    for ranks, key in ((4, "k4_equal_sums"), (3, "k3_unequal_sums")):
        assert max(sums(assign(sizes, ranks, sum(sizes)), sizes)) <= max(case.outputs[key])
    micro = sums(assign(sizes, 1, limit), sizes)
    assert max(micro) <= limit
    assert len(micro) <= case.outputs["n_micro"]
    assert max(micro) <= max(case.outputs["micro_batch_token_sums"])
    overflow = case.inputs["overflow_example"]
    assert max(sums(assign(overflow["seqlens"], 1, overflow["max_token_len"]), overflow["seqlens"])) <= 100


@golden("lr_warmup")
def test_learning_rate_warmup_equals_peer(case: Case) -> None:
    """Our first step is step 1; the peer's step 0 trains with a learning rate of 0."""
    optimizer = OptimizerConfig(lr=case.inputs["lr"], warmup_steps=case.inputs["warmup"])
    ours = [warmup_lr(optimizer, step) for step in range(len(case.outputs["lr_by_rollout_step"]))]
    assert_close(ours, case.outputs["lr_by_rollout_step"], atol=1e-15)
