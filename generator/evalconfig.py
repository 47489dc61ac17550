"""The configuration behind `headrace eval MODEL --prompts DATA`: no YAML file, the published recipe's settings.

DAPO (arXiv 2503.14476) evaluates on AIME 2024 with 32 samples per problem at temperature 1.0 and top_p 0.7, up to 20480
tokens each. A model with a shorter window gets what fits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import settings
from common.config import Config
from common.errors import ConfigError

MAX_PROMPT_TOKENS = 2048
MAX_RESPONSE_TOKENS = 20480
CPU_CACHE_MB = 1024


def config_for_model(folder: Path, prompts: str, reward: str = "math_dapo", overrides: Sequence[str] = ()) -> Config:
    """A configuration that evaluates the model in `folder` on all of the data set `prompts`.

    Args:
        folder: a Hugging Face model folder.
        prompts: a .parquet, .jsonl or .json file, a data-set folder, or a hub name.
        reward: a reward that needs no further settings: math_dapo or math_verify.
        overrides: `section.field=value`; they win.

    Raises:
        ConfigError: an override or the reward is refused, or config.json cannot be read.
    """
    window = _window(folder / "config.json")
    longest_prompt = min(MAX_PROMPT_TOKENS, window // 4)
    longest_response = min(MAX_RESPONSE_TOKENS, window - longest_prompt)
    data = {"type": "dataset", "path": prompts}
    tree: dict[str, Any] = {
        "run": {"name": "eval"},
        "model": {"path": str(folder)},
        "prompts": data,
        "reward": {"type": reward},
        "sampling": {"max_prompt_tokens": longest_prompt, "max_response_tokens": longest_response},
        "generator": _device(),
        "learner": {"micro_batch_tokens": 2**31},  # nothing is trained: its limit must not refuse a long answer
        "eval": {
            "prompts": dict(data),
            "limit": 2**31,
            "samples": 32,
            "temperature": 1.0,
            "top_p": 0.7,
            "max_response_tokens": longest_response,
        },
    }
    config = settings.resolve(tree, f"eval {folder}", overrides)
    assert config.eval is not None
    # Overrides of eval.prompts hold for both. A copy, since the source that *is* `config.prompts` holds some out.
    return config.model_copy(update={"prompts": config.eval.prompts.model_copy()})


def _window(path: Path) -> int:
    """Tokens that the model was made for; a large number where its configuration does not say."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return int(tree.get("text_config", tree).get("max_position_embeddings") or 2**31)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read as a model's configuration: {error}") from None


def _device() -> dict[str, Any]:
    """vLLM's settings for this machine.

    bfloat16 where the GPU has it, float16 on an older one; float32 on CPUs, most of which have no fast bfloat16. On a
    CPU vLLM would also take nine tenths of the memory for its cache, or not start.
    """
    import torch

    if not torch.cuda.is_available():
        return {"dtype": "float32", "kv_cache_mb": CPU_CACHE_MB}
    return {"dtype": "bfloat16" if torch.cuda.is_bf16_supported() else "float16"}
