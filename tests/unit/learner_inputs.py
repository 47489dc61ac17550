"""Groups, configurations and a small model for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from common.config import Config
from common.trajectory import Group, Response, VersionRun

VOCABULARY = 64


def make_config(**sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "nowhere"},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            **sections,
        }
    )


def make_response(
    rng: np.random.Generator,
    tokens: int,
    reward: float = 0.0,
    versions: Sequence[tuple[int, int]] = ((0, 0),),
    finish: Any = "stop",
) -> Response:
    return Response(
        token_ids=rng.integers(0, VOCABULARY, tokens).astype(np.int32),
        logprobs=rng.normal(-4, 0.5, tokens).astype(np.float32),
        versions=tuple(VersionRun(version, start) for version, start in versions),
        finish_reason=finish,
        raw_reward=reward,
        reward=reward,
        correct=reward > 0,
    )


def make_group(
    rng: np.random.Generator, group_id: str, prompt: int, lengths: Sequence[int], rewards: Sequence[float] | None = None
) -> Group:
    rewards = rng.normal(size=len(lengths)).tolist() if rewards is None else rewards
    return Group(
        group_id=group_id,
        prompt_ids=rng.integers(0, VOCABULARY, prompt).astype(np.int32),
        responses=tuple(make_response(rng, n, reward) for n, reward in zip(lengths, rewards, strict=True)),
        generator="g",
        temperature=1.0,
        sampled_at=0.0,
    )


def tiny_model(tied: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random Llama whose logits spread enough for differences to show."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype)


def float64_model() -> nn.Module:
    """A random GPT-2, tied, float64 throughout (Llama's norms compute in float32 whatever the model's type)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config).double()
