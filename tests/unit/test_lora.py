"""LoRA: what the configuration refuses, what the two ends share, and what a generator makes of a received adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_config import refuse, tree
from torch import Tensor

from common.config import Config
from common.errors import ConfigError, WireError
from common.lora import Adapter, base_checksum, merged, pairs
from common.weightcontrol import Update, read_control
from common.weightwire import Parameter
from generator.adapters import Base
from learner.checks import check

Weights = dict[str, Tensor]


@pytest.mark.parametrize(
    "lora, said",
    [
        ({"rank": 0}, "rank"),
        ({"alpha": -1}, "alpha"),
        ({"dropout": 1.0}, "dropout"),
        ({"target_modules": "q_proj"}, "is 'q_proj'; use 'all-linear', or a list"),
        ({"target_modules": []}, "empty list"),
        ({"target_modules": ["q_proj", "*"]}, "holds '*'"),
        ({"r": 8}, "learner.lora.r"),
    ],
)
def test_config_lora_impossible_value_refused_by_name(lora: dict[str, Any], said: str) -> None:
    assert said in refuse(learner={"lora": lora})


def test_config_lora_off_by_default_and_an_empty_section_works() -> None:
    assert Config.model_validate(tree()).learner.lora is None
    config = Config.model_validate(tree(learner={"lora": {}}))
    assert config.learner.lora is not None and config.learner.lora.scale == 2.0
    assert Config.model_validate(config.model_dump(mode="json")) == config


def test_check_layer_that_the_model_lacks_refused_before_it_is_loaded(tmp_path: Path) -> None:
    layers = {f"model.layers.0.self_attn.{name}.weight": torch.zeros(2, 2) for name in ("q_proj", "v_proj")}
    save_file({**layers, "model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")

    def configured(*names: str) -> Config:
        lora = {"target_modules": list(names)}
        return Config.model_validate(tree(model={"path": str(tmp_path)}, learner={"lora": lora, "dtype": "float32"}))

    check(configured("q_proj", "self_attn.v_proj"))
    for missing in ("v_prj", "proj", "norm"):
        with pytest.raises(ConfigError, match=rf"'{missing}' is no layer of .*; it has q_proj, v_proj"):
            check(configured("q_proj", missing))


def test_update_with_an_adapter_over_the_wire_is_the_same() -> None:
    update = Update(1, 2, (Parameter("x.lora_A.weight", "bfloat16", (2, 3)),), Adapter(0.5, 2**32 - 1))
    assert read_control(update.message()) == update
    with pytest.raises(WireError, match="base"):
        read_control({**update.message(), "adapter": {"scale": 0.5}})


@pytest.fixture
def weights() -> Weights:
    rng = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(*shape, generator=rng)
        for name, shape in (("embed.weight", (7, 5)), ("q.weight", (6, 5)), ("norm.weight", (5,)), ("o.weight", (5, 6)))
    }


@pytest.fixture
def factors() -> Weights:
    rng = torch.Generator().manual_seed(2)
    shapes = {"q.lora_A": (2, 5), "q.lora_B": (6, 2), "o.lora_A": (2, 6), "o.lora_B": (5, 2)}
    return {f"{name}.weight": torch.randn(*shape, generator=rng) for name, shape in shapes.items()}


def adapted(weights: Weights) -> Adapter:
    return Adapter(2.0, base_checksum((name, weights[name]) for name in ("q.weight", "o.weight")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_every_weight_comes_once_and_equals_the_formula(
    weights: Weights, factors: Weights, dtype: torch.dtype
) -> None:
    base = Base(weights.items, dtype, torch.device("cpu"))
    for _ in range(2):  # the base is not used up
        got = dict(base.merged(factors, adapted(weights)))
        assert list(got) == list(weights)
        for name, (a, b) in pairs(factors).items():
            want = weights[name].double() + 2.0 * b.double() @ a.double()
            torch.testing.assert_close(got[name], want.to(dtype), rtol=0, atol=1e-6 if dtype == torch.float32 else 0.02)
            torch.testing.assert_close(merged(weights[name], a, b, 2.0).double(), want, rtol=0, atol=1e-6)
        assert got["embed.weight"] is weights["embed.weight"]


def test_base_checksum_same_in_other_types_and_order_other_for_another_model(weights: Weights) -> None:
    half = {name: tensor.bfloat16() for name, tensor in reversed(weights.items())}
    assert base_checksum(half.items()) == base_checksum(weights.items())
    weights["q.weight"][0, 0] += 0.1
    assert base_checksum(half.items()) != base_checksum(weights.items())


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda f: f.pop("q.lora_B.weight"), "one of a pair"),
        (lambda f: f.update({"x.weight": torch.zeros(2)}), "'x.weight' is not one of a pair"),
        (lambda f: f.update({"q.lora_A.weight": torch.zeros(3, 5)}), "A is .3, 5. and B .6, 2."),
        (lambda f: f.update({"q.lora_A.weight": torch.zeros(2, 4)}), "q.weight is .6, 5. here"),
        (lambda f: f.update({"z.lora_A.weight": torch.zeros(1, 1), "z.lora_B.weight": torch.zeros(1, 1)}), "no weight"),
    ],
)
def test_merged_adapter_that_does_not_fit_refused_before_anything_is_loaded(
    weights: Weights, factors: Weights, spoil: Callable[[Weights], object], said: str
) -> None:
    adapter = adapted(weights)
    spoil(factors)
    with pytest.raises(WireError, match=said):
        Base(weights.items, torch.float32, torch.device("cpu")).merged(factors, adapter)


def test_merged_adapter_of_another_base_refused(weights: Weights, factors: Weights) -> None:
    adapter = Adapter(2.0, adapted(weights).base ^ 1)
    with pytest.raises(WireError, match=r"same model\.path"):
        Base(weights.items, torch.float32, torch.device("cpu")).merged(factors, adapter)
