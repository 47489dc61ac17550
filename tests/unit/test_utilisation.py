"""MFU: the floating-point operations that are counted are those that torch counts, and no token is counted twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_inputs import make_config, make_group
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from learner.batch import build_step
from learner.packing import plan
from learner.utilisation import Work, mfu, padding_share, peak_of

TOKENS = 24
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def counted(model: torch.nn.Module) -> float:
    """What torch counts in forward and backward of one sequence; attention of all tokens with all."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None]).logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(**TINY, tie_word_embeddings=tied, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    work = Work.of(model, trained=True)
    assert work is not None
    # torch's count has the rotary embedding's table in it, a matrix product without weights.
    assert work.flops(TOKENS, TOKENS, TOKENS**2) == pytest.approx(counted(model), rel=1e-3)


def test_frozen_weights_get_no_gradient_of_their_own() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, attn_implementation="eager"))
    work = Work.of(model, trained=False)
    assert work is not None
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.enable_input_require_grads()  # as below an adapter
    assert work.flops(TOKENS, TOKENS, TOKENS**2) == pytest.approx(counted(model), rel=1e-3)


def test_rows_with_shared_prompts_count_every_token_and_pair_once() -> None:
    work = Work(body=1000, head=10, attention=100, trained=True)
    step = build_step([make_group(np.random.default_rng(0), "a", 5, [3, 2])], make_config(), 0)
    (((row,),),) = plans = [plan(step, 1, 100)]
    pairs = 5 * 6 // 2 + (3 * 5 + 3 * 4 // 2) + (2 * 5 + 2 * 3 // 2)
    assert work.flops_of(row) == work.flops(tokens=10, scored=5, pairs=pairs)
    assert mfu(work, plans, device_s=2.0, peak=1e-6) == pytest.approx(work.flops_of(row) / 2e6)
    assert padding_share(plans) == 0


def test_padding_is_what_ranks_wait_for_the_longest_row() -> None:
    rng = np.random.default_rng(0)
    step = build_step([make_group(rng, "a", 10, [20, 20]), make_group(rng, "b", 5, [10, 5])], make_config(), 0)
    one, two = (plan(step, ranks, 60) for ranks in (1, 2))
    assert padding_share([one]) == 0, "a rank alone waits for nobody"
    tokens = sorted(len(row.input_ids) for rows in two for row in rows)
    assert padding_share([two]) == pytest.approx(1 - sum(tokens) / (2 * tokens[-1]))
    idle = plan(build_step([make_group(rng, "a", 10, [20, 20])], make_config(), 0), 3, 100)
    assert padding_share([idle]) == pytest.approx(1 / 3), "two responses for three ranks"


def test_mixture_of_experts_is_not_known() -> None:
    config = Qwen3MoeConfig(**TINY, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    assert Work.of(AutoModelForCausalLM.from_config(config), trained=True) is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0), ("NVIDIA L4", 121.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_peak_of_a_device_by_its_name(device: str, peak: float | None) -> None:
    assert peak_of(device) == peak
