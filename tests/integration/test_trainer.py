"""The real DeepSpeed engine: however a step is cut, it is the same step (architecture, invariant 10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

DRIVER = Path(__file__).parent / "trainer_driver.py"
ROOT = DRIVER.parents[2]


@dataclass(frozen=True)
class Update:
    grad_norm: float
    loss: float
    tokens: int
    micro_batches: int
    nonfinite: dict[str, bool]
    optional: list[dict[str, float]]
    resumed: dict[str, Any]
    adapter: dict[str, Any]
    weights: NDArray[np.float32]


def run_update(model: Path, folder: Path, ranks: int, stage: int, tokens: int, given: Path | None = None) -> Update:
    out = folder / f"ranks{ranks}-zero{stage}-tokens{tokens}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(DRIVER)]
    done = subprocess.run(
        [*command, str(model), str(stage), str(tokens), str(out), str(given or folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Update(**json.loads(out.read_text()), weights=np.load(out.with_suffix(".npy")))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reference leaves a checkpoint."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(tiny_model: Path, given: Path) -> Update:
    """The reference: one rank, one micro-batch."""
    update = run_update(tiny_model, given, 1, 0, 512)
    assert update.micro_batches == 1 and update.grad_norm > 0
    return update


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.long), 3])
def test_update_two_ranks_several_micro_batches_equals_one_big_batch(
    whole: Update, tiny_model: Path, tmp_path: Path, stage: int, given: Path
) -> None:
    cut = run_update(tiny_model, tmp_path, 2, stage, 64, given)
    assert cut.micro_batches >= 2
    assert cut.tokens == whole.tokens
    assert cut.loss == pytest.approx(whole.loss, rel=1e-5)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    # Adam's first step is lr * sign(g) but for gradients near its epsilon; the same sign nearly everywhere.
    assert np.mean(np.abs(cut.weights - whole.weights) > 1e-5) < 1e-3
    assert cut.nonfinite == {"skipped": True, "resumed": True}
    # One rank's checkpoint without ZeRO, loaded by two under any stage and saved again, is the same to the byte.
    assert cut.resumed["again"] == whole.resumed["again"] != {}
    assert cut.resumed["weights"] == pytest.approx(whole.resumed["weights"], abs=1e-5)
    if stage in (1, 3):
        check_options(whole, cut)
    check_adapter(whole, cut)


def check_adapter(whole: Update, cut: Update) -> None:
    """LoRA: the base stays, the adapter moves, and neither ranks nor ZeRO make a difference to it."""
    for update in (whole, cut):
        assert [name for name, value in update.adapter.items() if value is False] == []
        assert update.adapter["kl"][0] == 0 and update.adapter["kl"][1] > 1e-6
    assert cut.adapter["again"] == whole.adapter["again"] != {}
    assert cut.adapter["grad_norm"][0] == pytest.approx(whole.adapter["grad_norm"][0], rel=1e-4)
    # Both resumed from the same checkpoint.
    assert cut.adapter["grad_norm"][-1] == pytest.approx(whole.adapter["grad_norm"][-1], rel=1e-4)
    assert cut.adapter["kl"][-1] == pytest.approx(whole.adapter["kl"][-1], rel=1e-4, abs=1e-6)


def test_adapter_merged_by_export_or_by_peft_is_the_policy_that_was_trained(
    whole: Update, given: Path, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from trainer_driver import groups
    from transformers import AutoModelForCausalLM

    from learner import checkpoint
    from learner.export import export

    folder = checkpoint.folder_for(given / "adapter", 1)
    assert not (folder / "model").exists()
    export(folder, tmp_path / "out", "float32", "5GB", None)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    trained = np.load(next(given.glob("*.rank0.npz")))
    for name, parameter in exported.named_parameters():
        want = torch.tensor(trained[f"whole/{name}"])
        torch.testing.assert_close(parameter.detach(), want, rtol=0, atol=1e-6)
        torch.testing.assert_close(by_peft.get_parameter(name).detach(), want, rtol=0, atol=1e-6)
    logps = []
    for group in groups():
        for response in group.responses:
            ids = torch.tensor(np.concatenate([group.prompt_ids, response.token_ids]), dtype=torch.long)
            with torch.no_grad():
                logits = exported(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            logps.append(logits.gather(1, ids[1:, None])[len(group.prompt_ids) - 1 :, 0].numpy())
    np.testing.assert_allclose(np.sort(np.concatenate(logps)), trained["loaded"], atol=1e-5, rtol=0)


def test_adapter_exported_into_another_base_refused(given: Path, whole: Update, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from common.errors import ConfigError
    from learner import checkpoint
    from learner.export import export

    folder = checkpoint.folder_for(given / "given", 1)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(other)
    with pytest.raises(ConfigError, match="is not the model that the adapter"):
        export(checkpoint.folder_for(given / "adapter", 1), tmp_path / "out", "float32", "5GB", None, str(other))


def test_export_of_a_checkpoint_loads_in_transformers_with_the_same_weights(
    whole: Update, given: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from learner import checkpoint
    from learner.export import export

    folder = checkpoint.folder_for(given / "given", 1)
    export(folder, tmp_path / "out", "bfloat16", "2MB", None)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1, "sharded"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    as_it_is = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as master:
        for name, parameter in as_it_is.named_parameters():
            assert parameter.equal(master.get_tensor(name)), name
            assert exported.get_parameter(name).equal(parameter.bfloat16()), name


def check_options(whole: Update, cut: Update) -> None:
    """KL, entropy bonus, GAE and critic: every number of every update is that of one rank and one micro-batch."""
    first, second = whole.optional[0], whole.optional[1]
    assert first["kl_reference"] > 1e-4 and first["entropy"] > 0
    assert first["value_loss"] > 0 and first["value_grad_norm"] > 0
    assert first["explained_variance"] == 0.0  # everything is worth 0 at the start
    assert second["value_grad_norm"] > 0
    assert whole.optional[2]["explained_variance"] != 0.0
    assert whole.optional[-1]["restored"] and cut.optional[-1]["restored"]
    for ours, reference in zip(cut.optional[:2], whole.optional[:2], strict=True):
        assert ours == pytest.approx(reference, rel=1e-4, abs=1e-6)
    # The critic took steps of lr * sign(g) in between, which rounding turns around where a gradient is near zero.
    for ours, reference in zip(cut.optional[2:], whole.optional[2:], strict=True):
        for name in ("value_loss", "explained_variance", "return_mean", "kl_reference", "grad_norm"):
            assert ours[name] == pytest.approx(reference[name], rel=0.01, abs=1e-4), name
