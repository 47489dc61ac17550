"""Ranks that share packed rows (`learner.sequence_parallel`): the same updates as by one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

DRIVER = Path(__file__).parent / "sequence_driver.py"
ROOT = DRIVER.parents[2]
Run = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Run:
    """`run(cases)`: the record of each, by name; its checkpoint's tensors, by kind, as `tensors`, and as `again`."""

    def drive(*cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(tiny_model), str(tmp_path), json.dumps(cases)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        names = [case["name"] for case in cases]
        return {
            name: json.loads((tmp_path / f"{name}.json").read_text())
            | {"tensors": tensors(tmp_path / name), "again": tensors(tmp_path / f"{name}.again")}
            for name in names
        }

    return drive


def tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All of a kind in one array; kinds are files."""
    found = {}
    for file in folder.rglob("*.safetensors"):
        if file.name != "rng.safetensors":
            whole = load_file(file)
            found[f"{file.parent.name}/{file.stem}"] = np.concatenate([whole[name].ravel() for name in sorted(whole)])
    return found


def case(name: str, ranks: int, together: int, stage: int, tokens: int = 512, **more: Any) -> dict[str, Any]:
    return {"name": name, "ranks": ranks, "together": together, "stage": stage, "tokens": tokens, "options": {}, **more}


def check_same(ours: dict[str, Any], one: dict[str, Any]) -> None:
    """Loss, metrics, gradients and weights are those of one rank.

    AdamW turns rounding into steps of lr where a gradient is near zero, and the second batch's critic shows it. The
    norm is a float32 sum of millions of squares, in another order.
    """
    for index, (update, wanted) in enumerate(zip(ours["updates"], one["updates"], strict=True)):
        assert update.pop("grad_norm") == pytest.approx(wanted["grad_norm"], rel=1e-5 if index < 2 else 1e-4), index
        same = {name: value for name, value in wanted.items() if name != "grad_norm"}
        assert update == pytest.approx(same, rel=1e-6 if index < 2 else 1e-4, abs=1e-6), index
    assert ours["tensors"].keys() == one["tensors"].keys()
    for kind, ours_of_kind in ours["tensors"].items():
        difference = np.abs(ours_of_kind - one["tensors"][kind])
        if "exp_avg" in kind:  # the gradients, as the optimizer remembers them
            assert difference.max() < 1e-6, kind
        else:
            assert np.mean(difference > 1e-6) < 1e-3, kind


def test_rows_shared_by_two_ranks_give_the_updates_of_one_rank_and_its_checkpoint_back(run: Run) -> None:
    """ZeRO 3, every option of the objective, critic included, one row with an odd number of tokens."""
    done = run(case("zero3", 2, 2, 3), case("one", 1, 1, 1, given="zero3"))
    [tokens] = done["one"]["row_tokens"]
    assert tokens % 2
    check_same(done["zero3"], done["one"])
    saved, again = done["zero3"]["tensors"], done["one"]["again"]
    assert saved.keys() == again.keys() and all(np.array_equal(saved[kind], again[kind]) for kind in saved)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": True}])
def test_any_groups_of_ranks_give_the_updates_of_one_rank(run: Run, options: dict[str, Any]) -> None:
    """Several micro-batches over two groups; four ranks for two heads of keys; ZeRO 0 to 3."""
    done = run(
        case("one", 1, 1, 1, options=options), case("zero0", 2, 2, 0, 64, options=options),
        case("groups", 4, 2, 2, 40, options=options), case("four", 4, 4, 3, options=options),
        case("zero1", 2, 2, 1, options=options),
    )  # fmt: skip
    assert len(done["groups"]["row_tokens"]) >= 2 and len(done["zero0"]["row_tokens"]) >= 2
    for name in ("zero0", "groups", "four", "zero1"):
        check_same(done[name], done["one"])
