"""`headrace eval` without vLLM: published file layouts, real rewards, what it prints and saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from common import cli
from common.config import Config
from common.errors import ConfigError
from common.trajectory import Prompt, VersionRun
from generator import evaluate as evaluation
from generator.engine import Sampled
from generator.evalconfig import config_for_model
from generator.rewards import DataFailure

PROBLEMS = {"What is 1+1?": "2", "What is 20+5?": "25", "What is 3*9?": "27"}
# What the fake model says, in turn, to each problem.
ANSWERS = {
    "What is 1+1?": ["Answer: 2", "Answer: $2$", "Answer: 3", "Answer: 3"],  # 2 of 4 right, a tie
    "What is 20+5?": ["So:\nAnswer: 25", "Answer: 25", "Answer: 24", "no idea"],  # 2 of 4 right, the majority
    "What is 3*9?": ["Answer: 12", "Answer: 12", "Answer: 27", "27"],  # 1 of 4 right, outvoted
}


@pytest.fixture
def model(tmp_path: Path, tokenizer: Any) -> Path:
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')
    return folder


def _parquet(path: Path, repeats: int, index: Callable[[int], object]) -> Path:
    """In the schema of the published files: every problem `repeats` times."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"Solve the problem.\n\n{question}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index(number), "raw_problem": question, "split": None},
        }
        for number, (question, truth) in list(enumerate(PROBLEMS.items())) * repeats
    ]
    Dataset.from_list(rows).to_parquet(path)
    return path


def _sampled(text: str, tokens: int = 5, cut: bool = False) -> Sampled:
    ids, logprobs = np.zeros(tokens, dtype=np.int32), np.zeros(tokens, dtype=np.float32)
    return Sampled(ids, logprobs, (VersionRun(0, 0),), "length" if cut else "stop", text)


async def _sample(prompt: Prompt, seed: int) -> list[Sampled]:
    texts = next(texts for question, texts in ANSWERS.items() if question in prompt.text)
    return [_sampled(text, tokens=5 + 5 * (text == "no idea"), cut=text == "no idea") for text in texts]


class FakeEngine:
    """In the place of `Engine`: the same calls, no vLLM."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, config: Config, generator_id: str, initial_version: int | None = None) -> None:
        self.calls.clear()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, request_id: str, prompt_ids: Any, n: int, **options: Any) -> list[Sampled]:
        self.calls.append({"n": n, **options})
        return await _sample(Prompt(request_id, prompt_ids, list(PROBLEMS)[int(request_id.split("-")[1])]), 0)


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a `headrace eval` command with the fake engine."""
    monkeypatch.setattr(evaluation, "Engine", FakeEngine)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["headrace", "eval", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code in (0, None)

    return run


def _config(model: Path, path: Path, *overrides: str) -> Config:
    return config_for_model(model, str(path), overrides=overrides)


def test_aime_layout_from_the_command_line(
    headrace: Callable[..., None], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = _parquet(tmp_path / "aime.parquet", 32, index=int), tmp_path / "out" / "result.json"
    headrace(str(model), "eval.samples=4", "eval.seed=7", "--prompts", str(path), "--out", str(out))
    printed = capsys.readouterr()
    assert "96 rows, 3 problems (93 rows merged), 4 samples each" in printed.out
    assert "avg@4" in printed.out and "0.417" in printed.out and "majority@4" in printed.out
    assert "3 of 3 problems" in printed.err
    result = json.loads(out.read_text())
    assert (result["rows"], result["merged"], result["prompts"], result["samples"]) == (96, 93, 3, 4)
    values = {name: estimate["value"] for name, estimate in result["metrics"].items()}
    assert values == pytest.approx(
        {
            "avg@4": 5 / 12,
            "pass@1": 5 / 12,
            "pass@2": (5 / 6 + 5 / 6 + 1 / 2) / 3,
            "pass@4": 1.0,
            "majority@4": (1 / 2 + 1 + 0) / 3,
            "truncated": 1 / 12,
            "response_tokens": 65 / 12,
        }
    )
    assert result["accuracy"] == pytest.approx(5 / 12)
    assert (result["metrics"]["avg@4"]["low"], result["metrics"]["avg@4"]["high"]) == pytest.approx((1 / 4, 1 / 2))
    assert [(p["ground_truth"], p["correct"], p["answers"]) for p in result["problems"]] == [
        ("2", 2, {"2": 2, "3": 2}),
        ("25", 2, {"25": 2, "24": 1}),
        ("27", 1, {"12": 2, "27": 1}),
    ]
    assert len(result["answers"]) == 12 and result["answers"][1]["answer"] == "2"
    assert result["sampling"] == {
        "temperature": 1.0,
        "top_p": 0.7,
        "max_prompt_tokens": 256,
        "max_response_tokens": 768,
        "seed": 7,
        "dtype": "float32",
    }
    assert len({call.pop("seed") for call in FakeEngine.calls}) == 3, "each problem has draws of its own"
    assert FakeEngine.calls == [{"n": 4, "temperature": 1.0, "top_p": 0.7, "max_tokens": 768}] * 3


async def test_dapo_layout_with_string_index_and_a_limit(model: Path, tmp_path: Path) -> None:
    path = _parquet(tmp_path / "dapo.parquet", 100, index="uuid-{}".format)
    config = _config(model, path, "eval.samples=4", "eval.limit=2")
    source = evaluation.evaluation_source(config)
    assert evaluation.described(config, source).endswith(
        "300 rows, 3 problems (297 rows merged), the first 2 of them, 4 samples each"
    )
    done: list[int] = []
    result = await evaluation.evaluate(config, source, _sample, lambda: done.append(1))
    assert (result.rows, result.merged, result.prompts, len(done)) == (300, 297, 2, 2)
    assert result.accuracy == pytest.approx(1 / 2) and result.failures == 0


async def test_failures_are_wrong_and_fail_alone(model: Path, tmp_path: Path) -> None:
    path = _parquet(tmp_path / "aime.parquet", 2, index=int)
    reward = ("reward.type=function", "reward.function=reward_functions:fails", "reward.correct_at=1.0")
    config = _config(model, path, "eval.samples=4", *reward)

    async def sample(prompt: Prompt, seed: int) -> list[Sampled]:
        if "20+5" in prompt.text:
            raise DataFailure(f"vLLM refused the prompt {prompt.group_id}", "prompt")
        return [_sampled(text) for text in (("raise", "fine", "nan", "fine") if "1+1" in prompt.text else ["fine"] * 4)]

    result = await evaluation.evaluate(config, evaluation.evaluation_source(config), sample, lambda: None)
    assert [(p.correct, p.failures) for p in result.problems] == [(2, 2), (0, 4), (4, 0)]
    assert result.failures == 6 and result.accuracy == pytest.approx(1 / 2)
    assert result.first_failure is not None and "eval-" in result.first_failure
    assert result.no_majority is not None and "does not tell" in result.no_majority
    assert not any(name.startswith("majority") for name in result.metrics)


def test_same_prompt_with_another_answer_is_refused_with_its_rows(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Q", "answer": "1"}\n{"prompt": "P", "answer": "1"}\n{"prompt": "Q", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"rows 0 and 2 \('1' and '2'\)"):
        evaluation.evaluation_source(_config(model, path))


def test_reward_that_cannot_tell_right_from_wrong_is_refused(model: Path, tmp_path: Path) -> None:
    path = _parquet(tmp_path / "aime.parquet", 1, index=int)
    config = _config(model, path, "reward.type=function", "reward.function=reward_functions:length")
    with pytest.raises(ConfigError, match=r"reward\.correct_at: null"):
        evaluation.evaluation_source(config)


@pytest.mark.parametrize(
    ("window", "prompt", "response"), [('{"max_position_embeddings": 400}', 100, 300), ("{}", 2048, 20480)]
)
def test_model_folder_gets_the_recipe_or_what_fits(model: Path, window: str, prompt: int, response: int) -> None:
    (model / "config.json").write_text(window)
    config = config_for_model(model, "data.jsonl", "math_verify", ["eval.prompts.prompt_column=problem"])
    assert config.eval is not None
    assert (config.sampling.max_prompt_tokens, config.eval.max_response_tokens) == (prompt, response)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p) == (32, 1.0, 0.7)
    assert config.reward.type == "math_verify" and config.prompts == config.eval.prompts
    assert config.prompts is not config.eval.prompts, "or the source would hold every problem out"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{model}"], "give the problems with --prompts"),
        (["{model}", "--prompts", "a.jsonl", "--model", "other"], "is a model folder already"),
        (["{model}", "--prompts", "a.jsonl", "--reward", "best"], "reward: Input tag 'best'"),
        (["examples/tiny.yaml", "--prompts", "a.jsonl"], "--prompts a.jsonl: only with a model folder"),
        (["examples/tiny.yaml", "eval.nonsense=1"], "eval.nonsense: unknown key"),
    ],
)
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, arguments: list[str], reason: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "eval", *(a.format(model=model) for a in arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
