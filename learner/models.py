"""The models a rank holds: the policy, the frozen reference, and the critic on a copy of the policy's body."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.config import Config
from common.errors import ConfigError
from common.lora import Adapter
from learner import attention, lora
from learner.head import fuse_head
from learner.logprobs import check_packable, float32_head
from learner.sequence import check_heads


def causal_model(config: Config, path: str) -> Any:
    """A Hugging Face causal language model in the learner's dtype, ready for packed rows, on the CPU.

    Raises:
        ConfigError: packed rows would change what the model computes.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, config.learner.dtype),
        attn_implementation="sdpa" if config.learner.attention == "sdpa" else attention.register(),
        trust_remote_code=config.model.trust_remote_code,
    )
    check_packable(model.config, config.sampling.max_prompt_tokens + config.sampling.max_response_tokens)
    if config.learner.sequence_parallel > 1:
        _check_shareable(model, config.learner.sequence_parallel)
    if config.learner.dtype != "float32":
        float32_head(model)
    fuse_head(model)
    return model


def _check_shareable(model: Any, size: int) -> None:
    """Raises ConfigError where `size` ranks cannot share the model's rows."""
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    check_heads(size, heads, getattr(text, "num_key_value_heads", None) or heads)
    if not attention.reached(model):
        raise ConfigError(
            f"learner.sequence_parallel: {size}, but not every layer of a {model.config.model_type} hands on to its "
            "attention what it needs for a part of a row; use 1, or another model"
        )


def policy_model(config: Config) -> tuple[Any, Adapter | None]:
    """The model to train; with `learner.lora` only its adapter."""
    model = causal_model(config, config.model.path)
    model.train()
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    adapter = None if config.learner.lora is None else lora.add(model, config.learner.lora)
    if config.learner.compile == "layers":
        compile_layers(model)
    return model, adapter


def compile_layers(model: Any) -> None:
    """Have torch compile the model's layers, in place, for rows of any length.

    Attention is left out (`learner.attention`): it depends on what is in a row, and would be compiled for each.
    """
    names = set(model._no_split_modules or ())
    for layer in model.modules():
        if type(layer).__name__ in names:
            layer.compile(dynamic=True)


def reference_model(config: Config, policy: Any, device: torch.device) -> nn.Module:
    """The frozen model of `objective.reference`, whole on every rank.

    Raises:
        ConfigError: its vocabulary is another than the policy's.
    """
    path = config.objective.reference or config.model.path
    model = causal_model(config, path)
    theirs, ours = model.config.vocab_size, policy.config.vocab_size
    if theirs != ours:
        raise ConfigError(
            f"objective.reference: {path!r} has a vocabulary of {theirs}, model.path one of {ours}; use a model with "
            "the policy's tokenizer"
        )
    frozen: nn.Module = model.eval().requires_grad_(False).to(device)
    return frozen


class ValueHead(nn.Module):
    """One number per hidden state, in float32 (or float64) whatever the weights' type; zero at the start."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, width) -> (tokens,)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))[:, 0]


class CriticModel(nn.Module):
    """The body of a causal language model with a value head in place of the language model's."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.body = causal.base_model
        self.head = ValueHead(causal.config.get_text_config().hidden_size, next(causal.parameters()).dtype)

    def forward(self, predict_from: Tensor, **row: Any) -> Tensor:
        """Values at the positions `predict_from` of one packed row: V of the state that predicts each target, (R,)."""
        hidden = self.body(**row).last_hidden_state[0]
        return self.head(hidden[predict_from])


def critic_model(config: Config) -> CriticModel:
    """A critic that starts from the policy's starting model and values everything 0."""
    causal = causal_model(config, config.model.path)
    if config.learner.gradient_checkpointing:
        causal.gradient_checkpointing_enable()
    return CriticModel(causal).train()
