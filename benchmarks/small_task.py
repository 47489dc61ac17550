"""A task for ablations that two CPU cores can train in a minute: sums of two digits, by a model that half knows them.

The model is a Llama of a million parameters, taught here by supervised learning to answer `<filler> Answer: N`. How
often what it was taught is right differs from prompt to prompt, from seldom to nearly always, and so does the length of
the filler, which sometimes reaches the token limit. So every technique of the ablation has something to do: groups that
are all right or all wrong, truncated answers, rare right answers whose probability has to grow, easy ones whose entropy
may collapse.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_RESPONSE_TOKENS = 32
_FILLERS = ("first think", "step by step", "write down", "the sum", "check twice", "before you continue")
_ANSWER = re.compile(r"Answer: (\d+)$")
_TEACH_STEPS, _TEACH_BATCH, _TEACH_LR = 250, 64, 2e-3


def right(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the completion ends with `Answer: N` and N is right, else 0.0."""
    found = [_ANSWER.search(completion.strip()) for completion in completions]
    return [float(match is not None and match[1] == truth) for match, truth in zip(found, answer, strict=True)]


def _rows() -> list[dict[str, str]]:
    """The prompts with their answers: few enough to come back every third step."""
    return [
        {"prompt": f"What is {left} plus {other}?", "answer": str(left + other)}
        for left in range(3, 8)
        for other in range(3, 8)
    ]


ROWS = _rows()


def make(folder: Path, steps: int = _TEACH_STEPS) -> tuple[Path, Path]:
    """The taught model's folder and the prompts' file; made once (some minutes on one core), the same on every call."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    if not (model / "config.json").is_file():
        _teach(model, steps)
    return model, prompts


def _share_right(index: int) -> float:
    """How often the teacher is right about a prompt, from 0.05 to 0.95."""
    return random.Random(index).choice((0.05, 0.2, 0.4, 0.6, 0.8, 0.95))


def _lesson(draw: random.Random) -> tuple[str, str]:
    """A prompt and what the teacher says to it."""
    index = draw.randrange(len(ROWS))
    row = ROWS[index]
    answer = int(row["answer"])
    if draw.random() >= _share_right(index):
        answer = abs(answer + draw.choice((-3, -2, -1, 1, 2, 3)))
    filler = " ".join(draw.choice(_FILLERS) for _ in range(draw.randrange(6)))
    return row["prompt"], f"{filler} Answer: {answer}".strip()


def _batches(tokenizer: Any, steps: int) -> Iterator[tuple[Any, Any]]:
    """Token ids and labels, (batch, longest) int64; what is not the teacher's is masked."""
    import torch

    draw = random.Random(0)
    for _ in range(steps):
        ids, labels = [], []
        for _ in range(_TEACH_BATCH):
            prompt, response = _lesson(draw)
            head = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            tail = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids.append(torch.tensor(head + tail))
            labels.append(torch.tensor([-100] * len(head) + tail))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def _teach(folder: Path, steps: int) -> None:
    import torch
    from rich.progress import track
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT / "examples"))
    from make_models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            dtype="float32",
            **ids,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_TEACH_LR, weight_decay=0.0)
    for step, (batch, labels) in enumerate(track(_batches(tokenizer, steps), "teaching", total=steps)):
        for group in optimizer.param_groups:
            group["lr"] = _TEACH_LR * min(1.0, (step + 1) / 20, (steps - step) / (steps / 4))
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"taught: cross-entropy {loss.item():.3f} nats a token", file=sys.stderr)
    model.generation_config = GenerationConfig(**ids)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
