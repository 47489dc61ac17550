"""Prompt sources: schemas, templates, order, limits, and start-up errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from broker.datafiles import plain
from broker.sources import Counts, Source, check_source, open_source
from common import wire
from common.config import Config
from common.errors import ConfigError
from common.trajectory import Prompt

QUESTIONS = [f"What is {n} plus {n}?" for n in range(20)]


@pytest.fixture
def model(tmp_path: Path, tokenizer: Any) -> Path:
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def _config(folder: Path | str = "model", prompts: dict[str, Any] | None = None, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "seed": 3},
            "model": {"path": str(folder)},
            "prompts": prompts or {"type": "reasoning_gym", "task": "chain_sum", "size": 20},
            "reward": {"type": "math_verify"},
            **sections,
        }
    )


def _open(config: Config, tokenizer: Any, shuffle: bool = True) -> Source:
    return open_source(config.prompts, config, tokenizer, shuffle=shuffle)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "dataset", "path": str(path)}


def _plain_rows(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {**_jsonl(tmp_path / "plain.jsonl", [{"prompt": q, "n": i} for i, q in enumerate(QUESTIONS)]), **options}


def _dapo_row(question: str, index: int | str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"},
        "extra_info": {"index": index},
    }


def test_reasoning_gym_item_has_template_tokens_and_columns(tokenizer: Any) -> None:
    prompts = {"type": "reasoning_gym", "task": "chain_sum", "size": 20, "suffix": " Be brief."}
    item = _open(_config(prompts=prompts), tokenizer)[0]
    assert item.text.startswith("<|user|>") and item.text.endswith(" Be brief.<|end|><|assistant|>")
    assert tokenizer.decode(item.token_ids) == item.text
    assert item.columns["task"] == "chain_sum" and item.columns["entry"]["answer"] == item.columns["answer"]
    message = wire.encode_prompt(Prompt("0", item.token_ids, item.text, item.columns))
    assert wire.decode_prompt(message).columns == item.columns


@pytest.mark.parametrize(("system", "start"), [(None, "<|user|>"), ("", "<|system|><|end|>"), ("Hi", "<|system|>Hi<|")])
def test_system_message_null_empty_and_set_reach_the_template(tokenizer: Any, system: str | None, start: str) -> None:
    prompts = {"type": "reasoning_gym", "task": "chain_sum", "size": 20, "system": system}
    assert _open(_config(prompts=prompts), tokenizer)[0].text.startswith(start)


def test_order_is_a_new_permutation_each_pass_and_the_same_when_asked_again(tokenizer: Any, tmp_path: Path) -> None:
    config = _config(prompts=_plain_rows(tmp_path))
    source = _open(config, tokenizer)
    first, second = ([source[p].columns["n"] for p in range(start, start + 20)] for start in (0, 20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    again = _open(config, tokenizer)
    assert [again[p].columns["n"] for p in (25, 3, 39)] == [second[5], first[3], second[19]]
    reseeded = _open(_config(prompts=_plain_rows(tmp_path), run={"name": "test", "seed": 4}), tokenizer)
    assert [reseeded[p].columns["n"] for p in range(20)] != first


def test_unshuffled_source_keeps_the_order_and_wraps_around(tokenizer: Any, tmp_path: Path) -> None:
    source = _open(_config(prompts=_plain_rows(tmp_path)), tokenizer, shuffle=False)
    assert [source[p].columns["n"] for p in (0, 1, 19, 20)] == [0, 1, 19, 0]


def test_plain_text_gets_no_template(tokenizer: Any, tmp_path: Path) -> None:
    source = _open(_config(prompts=_plain_rows(tmp_path, suffix=" =")), tokenizer, shuffle=False)
    assert source[2].text == "What is 2 plus 2? ="
    assert source[2].columns == {"n": 2}


def test_messages_without_template_are_joined(tokenizer: Any, tmp_path: Path) -> None:
    prompts = {**_jsonl(tmp_path / "a.jsonl", [_dapo_row("Q?", 1)]), "system": "S"}
    config = _config(prompts=prompts, model={"path": "m", "chat_template": False})
    assert _open(config, tokenizer)[0].text == "S\n\nQ?"


@pytest.mark.parametrize("index", [7, "7-a"], ids=["int", "str"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "folder", "splits"])
def test_dapo_schema_gives_ground_truth_and_every_other_column(
    tokenizer: Any, tmp_path: Path, kind: str, index: int | str
) -> None:
    rows, path = [_dapo_row("Q?", index)], tmp_path / f"data.{kind}"
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "jsonl":
        _jsonl(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "folder":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(path)
    config = _config(prompts={"type": "dataset", "path": str(path)})
    item = _open(config, tokenizer)[0]
    assert item.text == "<|user|>Q?<|end|><|assistant|>"
    assert item.columns == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"},
        "extra_info": {"index": index},
        "ground_truth": "42",
    }


def test_duplicate_prompts_are_dropped_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [_dapo_row(question, i) for i in range(3) for question in QUESTIONS]
    prompts = _jsonl(tmp_path / "twice.jsonl", rows)
    caplog.set_level(logging.INFO, "headrace.source")
    logging.getLogger("headrace").propagate = True
    assert len(_open(_config(prompts=prompts), tokenizer)) == 20
    assert "60 rows, 40 duplicates dropped" in caplog.text
    assert len(_open(_config(prompts={**prompts, "deduplicate": False}), tokenizer)) == 60


def test_duplicates_with_another_answer_are_refused_in_evaluation_and_logged_in_training(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [_dapo_row(question, i) for i in range(2) for question in QUESTIONS]
    rows[27]["reward_model"] = {"ground_truth": "41", "style": "rule"}
    config = _config(prompts=_jsonl(tmp_path / "twice.jsonl", rows))
    with pytest.raises(ConfigError, match=r"1 of 40 rows repeat .* rows 7 and 27 \('42' and '41'\)"):
        _open(config, tokenizer, shuffle=False)
    caplog.set_level(logging.INFO, "headrace.source")
    logging.getLogger("headrace").propagate = True
    assert len(_open(config, tokenizer)) == 20
    assert "rows 7 and 27 ('42' and '41')" in caplog.text


def test_duplicates_that_agree_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "answer": 42}, {"prompt": "Q", "answer": 42, "note": "again"}]
    source = _open(_config(prompts=_jsonl(tmp_path / "a.jsonl", rows)), tokenizer, shuffle=False)
    assert source.counts == Counts(rows=2, merged=1)


def test_long_prompts_are_left_out_of_a_data_set(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "long " * 100}]
    config = _config(prompts=_jsonl(tmp_path / "a.jsonl", rows), sampling={"max_prompt_tokens": 20})
    source = _open(config, tokenizer)
    assert len(source) == 1 and source[5].text == "short"
    assert source.counts == Counts(rows=2, left_out=1)
    shorter = _config(prompts=_jsonl(tmp_path / "b.jsonl", rows[1:]), sampling={"max_prompt_tokens": 20})
    with pytest.raises(ConfigError, match=r"no usable prompt.*max_prompt_tokens"):
        _open(shorter, tokenizer)


def test_long_reasoning_gym_items_are_replaced(tokenizer: Any) -> None:
    prompts = {"type": "reasoning_gym", "task": "chain_sum", "size": 20, "options": {"max_terms": 9}}
    lengths = sorted(len(_open(_config(prompts=prompts), tokenizer, shuffle=False)[p].token_ids) for p in range(20))
    limited = _open(_config(prompts=prompts, sampling={"max_prompt_tokens": lengths[10]}), tokenizer)
    assert max(len(limited[p].token_ids) for p in range(20)) <= lengths[10]
    impossible = _config(prompts=prompts, sampling={"max_prompt_tokens": 2})
    with pytest.raises(ConfigError, match=r"all 20 prompts .*sampling\.max_prompt_tokens"):
        _open(impossible, tokenizer)[0]


@pytest.mark.parametrize("kind", ["reasoning_gym", "dataset"])
def test_training_prompts_leave_out_what_evaluation_holds(tokenizer: Any, tmp_path: Path, kind: str) -> None:
    if kind == "dataset":
        prompts: dict[str, Any] = _plain_rows(tmp_path)
    else:
        options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        prompts = {"type": "reasoning_gym", "task": "chain_sum", "size": 100, "options": options}
    config = _config(prompts=prompts, eval={"prompts": prompts, "limit": 9})
    assert config.eval is not None
    evaluation = open_source(config.eval.prompts, config, tokenizer, shuffle=False)
    held_out = {evaluation[position].text for position in range(9)}
    training = _open(config, tokenizer)
    texts = {training[position].text for position in range(2 * len(training))}
    assert len(texts) > 9
    assert not texts & held_out


def test_training_prompts_all_held_out_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    prompts = _plain_rows(tmp_path)
    with pytest.raises(ConfigError, match=r"eval\.prompts"):
        _open(_config(prompts=prompts, eval={"prompts": prompts, "limit": 20}), tokenizer)


@pytest.mark.parametrize("prompt", [None, "", [], 3, [{"role": "user"}]])
def test_unusable_prompt_is_refused_with_its_row(tokenizer: Any, tmp_path: Path, prompt: object) -> None:
    path = tmp_path / "bad.parquet"
    Dataset.from_list([{"prompt": prompt}]).to_parquet(path)
    with pytest.raises(ConfigError, match="row 0 of column 'prompt'"):
        _open(_config(prompts={"type": "dataset", "path": str(path)}), tokenizer)


def test_system_message_with_plain_text_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.system"):
        _open(_config(prompts=_plain_rows(tmp_path, system="S")), tokenizer)


def test_plain_makes_values_that_msgpack_carries() -> None:
    assert plain({1: (2, {3}), "b": b"x", "big": 2**70, "t": True}) == {
        "1": [2, [3]], "b": b"x", "big": str(2**70), "t": True,
    }  # fmt: skip


# --- start-up checks


def test_check_accepts_a_good_configuration(model: Path, tmp_path: Path) -> None:
    check_source(_config(model))
    check_source(_config(model, _plain_rows(tmp_path)))


def _refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_source(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_names_a_missing_model_folder() -> None:
    assert "model.path: no such folder: './models/none'" in _refused(_config("./models/none"))


def test_check_names_what_a_model_folder_lacks(tmp_path: Path) -> None:
    assert "no config.json" in _refused(_config(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "no tokenizer" in _refused(_config(tmp_path))


def test_check_lists_close_matches_of_an_unknown_task(model: Path) -> None:
    assert "chain_sum" in _refused(_config(model, {"type": "reasoning_gym", "task": "chainsum"}))


@pytest.mark.parametrize("options", [{"nonsense": 1}, {"min_terms": 5, "max_terms": 2}, {"size": 3}])
def test_check_refuses_options_of_a_task(model: Path, options: dict[str, Any]) -> None:
    text = _refused(_config(model, {"type": "reasoning_gym", "task": "chain_sum", "options": options}))
    assert text.startswith("prompts.options:")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_check_names_a_missing_file(model: Path, tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"none.{suffix}")
    assert "no such file" in _refused(_config(model, {"type": "dataset", "path": path}))


def test_check_lists_the_columns_when_one_is_missing(model: Path, tmp_path: Path) -> None:
    text = _refused(_config(model, _plain_rows(tmp_path, prompt_column="question")))
    assert "no column 'question'" in text and "prompt, n" in text


def test_check_looks_at_the_evaluation_prompts_too(model: Path, tmp_path: Path) -> None:
    prompts = _plain_rows(tmp_path, prompt_column="question")
    assert _refused(_config(model, eval={"prompts": prompts})).startswith("eval.prompts.prompt_column")


def test_check_names_a_file_that_is_not_what_it_says(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    path.write_text("not parquet")
    assert "cannot be read" in _refused(_config(model, {"type": "dataset", "path": str(path)}))
