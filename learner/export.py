"""A checkpoint's model in Hugging Face format, in a dtype and in shards of one's choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from common.lora import Adapter, base_checksum, merged, pairs
from learner import capture, checkpoint, lora
from learner.fragments import WEIGHT

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export(
    folder: Path, out: Path, dtype: str, max_shard_size: str, to_hub: str | None, base: str | None = None
) -> None:
    """Write the model and tokenizer of the checkpoint `folder` to `out`, and to the hub under the name `to_hub`. An
    adapter is merged into its base, in float32: into the model `base`, None: where it was when it was trained.

    Raises:
        ConfigError: another dtype than those in `DTYPES`, `out` is there already, or another base than the adapter's.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r}; use one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there already; expected a folder to make")
    source = folder / (lora.FOLDER if (folder / lora.FOLDER).is_dir() else "model")
    if source.name == lora.FOLDER:
        model = _merged(folder, base).to(DTYPES[dtype])
    elif base is not None:
        raise ConfigError(f"--base: {base!r}, but {folder} holds a whole model; leave it out")
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
    tokenizer = AutoTokenizer.from_pretrained(source)
    for part in (model, tokenizer):
        part.save_pretrained(out, **({"max_shard_size": max_shard_size} if part is model else {}))
        if to_hub is not None:
            part.push_to_hub(to_hub)


def _merged(folder: Path, base: str | None) -> Any:
    """The model of a checkpoint's adapter, in float32."""
    from transformers import AutoModelForCausalLM

    adapter = Adapter(**(checkpoint.read_state(folder).adapter or {}))  # type: ignore[arg-type]
    config = json.loads((folder / lora.FOLDER / "adapter_config.json").read_text(encoding="utf-8"))
    path = base or config["base_model_name_or_path"]
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except OSError as error:
        raise ConfigError(f"{path}: the base of {folder} cannot be read ({error}); name it with --base") from None
    saved = load_file(folder / capture.files_of(capture.ADAPTER)[WEIGHT])
    factors = pairs({lora.wire_name(name): tensor for name, tensor in saved.items()})
    weights = dict(model.named_parameters())
    if base_checksum((name, weights[name]) for name in factors if name in weights) != adapter.base:
        raise ConfigError(f"--base: {path} is not the model that the adapter of {folder} was trained on; name that one")
    with torch.no_grad():
        for name, (a, b) in factors.items():
            weights[name].copy_(merged(weights[name], a, b, adapter.scale))
    return model
