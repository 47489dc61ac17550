"""Log-probabilities, balance and learning rate against the peers' numbers."""

from __future__ import annotations

import pytest
import torch
from golden_cases import Case, assert_close, by_number, flat, golden

from common.config import OptimizerConfig
from learner.logprobs import token_logprobs
from learner.packing import assign, row_cost
from learner.trainer import warmup_lr


@golden("logprob_entropy_temperature")
def test_logprobs_at_temperature_equal_peer(case: Case) -> None:
    targets = torch.tensor(case.inputs["labels"]).flatten()
    by_temperature = by_number(case.outputs, "T=")
    assert set(by_temperature) == set(case.inputs["temperatures"])
    for temperature, outputs in by_temperature.items():
        logits = torch.tensor(case.inputs["logits"], dtype=torch.float64).flatten(0, 1)
        logp, entropy = token_logprobs(logits, targets, temperature, chunk=3)
        assert_close(logp, flat(outputs["logprob"]))
        assert_close(entropy, flat(outputs["entropy"]))


def sums(lock_steps: list[list[list[int]]], sizes: list[int]) -> list[int]:
    """Tokens of every bin, after a check that the bins hold every row exactly once."""
    bins = [items for lock_step in lock_steps for items in lock_step]
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    return [sum(sizes[item] for item in items) for items in bins]


@golden("seqlen_balance")
def test_cost_is_the_peers_workload(case: Case) -> None:
    assert [row_cost(size) for size in case.inputs["seqlens"]] == case.outputs["workload"]


@golden("seqlen_balance")
@pytest.mark.parametrize(
    ("parts", "key"),
    [(4, "k4_equal_sums"), (4, "k4_equal_by_workload_token_sums"), (3, "k3_unequal_sums")],
)
def test_balance_over_ranks_no_worse_than_peer(case: Case, parts: int, key: str) -> None:
    """Partitions are not compared, as they may differ."""
    sizes = case.inputs["seqlens"]
    assert max(sums(assign(sizes, parts, sum(sizes)), sizes)) <= max(case.outputs[key])


@golden("seqlen_balance")
def test_micro_batches_no_worse_than_peer_and_never_beyond_the_limit(case: Case) -> None:
    """The peer fixes the number of micro-batches first, and then exceeds the token limit where they do not fit
    (`overflow_example`). For us the limit is memory, and hard: rather one micro-batch more than `n_micro`."""
    sizes, limit, outputs = case.inputs["seqlens"], case.inputs["max_token_len"], case.outputs
    micro = sums(assign(sizes, 1, limit), sizes)
    assert max(micro) <= limit
    assert max(micro) <= max(outputs["micro_batch_token_sums"])
    overflow = case.inputs["overflow_example"]
    assert max(sums(assign(overflow["seqlens"], 1, overflow["max_token_len"]), overflow["seqlens"])) <= (
        overflow["max_token_len"]
    )


@golden("lr_warmup")
def test_learning_rate_warmup_equals_peer(case: Case) -> None:
    """Our first step is step 1; the peer's step 0 trains with a learning rate of 0."""
    optimizer = OptimizerConfig(lr=case.inputs["lr"], warmup_steps=case.inputs["warmup"])
    ours = [warmup_lr(optimizer, step) for step in range(len(case.outputs["lr_by_rollout_step"]))]
    assert_close(ours, case.outputs["lr_by_rollout_step"], atol=1e-15)
