"""A checkpoint's model in Hugging Face format, in a dtype and in shards of one's choice."""

from __future__ import annotations

from pathlib import Path

import torch

from common.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export(folder: Path, out: Path, dtype: str, max_shard_size: str, to_hub: str | None) -> None:
    """Write the model and tokenizer of the checkpoint `folder` to `out`, and to the hub under the name `to_hub`.

    Raises:
        ConfigError: another dtype than those in `DTYPES`, or `out` is there already.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r}; use one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there already; expected a folder to make")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[dtype])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for part in (model, tokenizer):
        part.save_pretrained(out, **({"max_shard_size": max_shard_size} if part is model else {}))
        if to_hub is not None:
            part.push_to_hub(to_hub)
