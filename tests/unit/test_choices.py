"""What the learner's section lets one choose of the computation: refusals, and that every choice computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_inputs import make_config, tiny_model
from pydantic import ValidationError
from test_logprobs import make_step, run

from common.errors import ConfigError
from learner import attention, choices
from learner.checks import check
from learner.models import compile_layers
from learner.packing import plan


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"ranks": 3, "sequence_parallel": 2}, "sequence_parallel is 2, which does not divide ranks (3)"),
        ({"ranks": 2, "sequence_parallel": 2, "attention": "sdpa"}, "attention is 'sdpa', which needs whole rows"),
        ({"compile": "layers", "zero_stage": 3}, "compile is 'layers', and zero_stage is 3"),
        ({"attention": "flash_attention_2"}, "learner.attention"),
    ],
)
def test_choices_that_do_not_go_together_refused(learner: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        make_config(learner=learner)
    assert words in str(refused.value)


def test_longest_sequence_is_measured_against_what_the_ranks_of_a_row_hold_together() -> None:
    learner = {"ranks": 2, "sequence_parallel": 2, "micro_batch_tokens": 512}
    assert make_config(learner=learner).learner.row_tokens == 1024
    with pytest.raises(ValidationError, match="use at least 512"):
        make_config(learner={**learner, "micro_batch_tokens": 511})


@pytest.mark.parametrize(("heads", "key_heads", "right"), [(4, 4, "1, 2, 4"), (9, 3, "1, 3, 9"), (12, 2, "1, 2, 4, 6")])
def test_heads_that_the_ranks_cannot_share_refused_before_loading(
    tmp_path: Path, heads: int, key_heads: int, right: str
) -> None:
    settings = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = make_config(model={"path": str(tmp_path)}, learner={"ranks": 8, "sequence_parallel": 8})
    with pytest.raises(ConfigError, match=rf"sequence_parallel: 8 .* {heads} attention heads .*one of {right}"):
        check(config)


def test_compile_without_a_compiler_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner\.compile: 'layers' needs a C\+\+ compiler"):
        check(make_config(learner={"compile": "layers"}))
    assert "compile=off (no g++ or clang++ here)" in choices.chosen(make_config())


def test_attention_that_never_gets_the_blocks_is_told() -> None:
    model = tiny_model()
    model.set_attn_implementation(attention.register())  # type: ignore[operator]
    assert attention.reached(model)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    assert not attention.reached(model)


@pytest.mark.long
def test_compiled_layers_give_the_same_gradients_for_rows_of_any_length() -> None:
    rows = plan(make_step(), 1, 30)[0]
    assert len({len(row.input_ids) for row in rows}) > 1
    results = []
    for compiled in (False, True):
        model = tiny_model()
        model.set_attn_implementation(attention.register())  # type: ignore[operator]
        if compiled:
            compile_layers(model)
        results.append(run(model, rows))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    for name, wanted in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
