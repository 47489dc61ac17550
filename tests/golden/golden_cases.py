"""Access to the reference numbers: which tests run over which cases, and how numbers are compared.

A case's `second` setting becomes a case of its own. Ids may carry a suffix after the name a test asks for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from common.config import ObjectiveConfig
from learner.batch import sequence_scale
from learner.objective import Loss, Tokens, policy_loss

DEFAULT_FILE = Path(__file__).with_name("dapo_golden.json")
TESTED: set[str] = set()  # names that some test of the modules imported so far asks for
Test = TypeVar("Test", bound=Callable[..., None])


class LayoutError(Exception):
    """The file is not laid out as dapo_golden.json; says where and what was expected."""


class Fields(dict[str, Any]):
    """A case's inputs or outputs; one that is missing fails the test with its name."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> Any:
        pytest.fail(f"the file has no {self.where}.{name}; it has {', '.join(self)}", pytrace=False)


@dataclass(frozen=True)
class Case:
    id: str
    inputs: Fields
    outputs: Any  # Fields, or a list of {...}


def golden(name: str) -> Callable[[Test], Test]:
    """Run the test once per case whose id is `name`, or starts with it."""
    TESTED.add(name)

    def mark(test: Test) -> Test:
        test.golden_name = name  # type: ignore[attr-defined]
        return test

    return mark


@functools.cache
def load(path: Path) -> tuple[Case, ...]:
    """Every case of the file, `second` settings included.

    Raises:
        LayoutError: it cannot be read, is not JSON, or lacks something every case has.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list) or not content["cases"]:
        raise LayoutError(f"{path}: expected an object with a list `cases` that is not empty")
    cases: list[Case] = []
    for position, raw in enumerate(content["cases"]):
        if not isinstance(raw, dict) or not isinstance(raw.get("id"), str):
            raise LayoutError(f"{path}: cases[{position}] has no text `id`")
        where = f"{path}: case {raw['id']}"
        if not isinstance(raw.get("inputs"), dict) or not isinstance(raw.get("outputs"), (dict, list)):
            raise LayoutError(f"{where}: expected an object `inputs` and an object or a list `outputs`")
        cases += _settings(raw, where)
    if repeated := {case.id for case in cases if [other.id for other in cases].count(case.id) > 1}:
        raise LayoutError(f"{path}: case ids {', '.join(sorted(repeated))} are there twice")
    return tuple(cases)


def _settings(raw: dict[str, Any], where: str) -> list[Case]:
    """The case itself, and its `second` setting, which overrides the inputs it names."""
    inputs, outputs = dict(raw["inputs"]), raw["outputs"]
    settings = []
    if "second" in inputs or "second" in outputs:
        second_in, second_out = inputs.pop("second", None), None
        if isinstance(outputs, dict):
            outputs = dict(outputs)
            second_out = outputs.pop("second", None)
        if not isinstance(second_in, dict) or not isinstance(second_out, (dict, list)):
            raise LayoutError(f"{where}: `second` must be in both its inputs and its outputs")
        settings.append(_case(f"{raw['id']}-second", {**inputs, **second_in}, second_out))
    return [_case(raw["id"], inputs, outputs), *settings]


def _case(name: str, inputs: dict[str, Any], outputs: Any) -> Case:
    named = Fields(f"{name}.outputs", outputs) if isinstance(outputs, dict) else outputs
    return Case(name, Fields(f"{name}.inputs", inputs), named)


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Tolerance D of the reference (float64 peers); pass others where a case says so."""
    if isinstance(ours, torch.Tensor):
        ours = ours.detach().numpy()
    np.testing.assert_allclose(np.asarray(ours, dtype=np.float64), np.asarray(theirs, np.float64), rtol=rtol, atol=atol)


def flat(rows: Any) -> torch.Tensor:
    """A (rows, positions) list as one float64 tensor of all its entries."""
    return torch.tensor(rows, dtype=torch.float64).flatten()


def by_number(outputs: Fields, prefix: str) -> dict[float, Any]:
    """Outputs keyed `<prefix><number>`, by number: 1 and 1.0 are the same key."""
    return {float(key.removeprefix(prefix)): value for key, value in outputs.items() if key.startswith(prefix)}


def row_index(mask: Any) -> torch.Tensor:
    """Row of every entry of a (rows, positions) list, flattened."""
    rows, positions = np.shape(mask)
    return torch.arange(rows).repeat_interleave(positions)


def objective(inputs: dict[str, Any], **fields: Any) -> ObjectiveConfig:
    """The objective a case describes, without correction unless `fields` says otherwise."""
    fields.setdefault("correction", {"mode": "none"})
    fields.setdefault("dual_clip", inputs.get("clip_ratio_c"))
    if "clip_low" in inputs:
        fields.setdefault("clip_low", inputs["clip_low"])
        fields.setdefault("clip_high", inputs["clip_high"])
    return ObjectiveConfig.model_validate(fields)


def run_loss(
    config: ObjectiveConfig,
    log_prob: Any,
    anchor: Any,
    advantages: Any,
    mask: Any,
    behav: Any = None,
    scale: Any = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Loss, torch.Tensor]:
    """The loss over a (rows, positions) case, and its gradient with respect to log_prob, in that shape.

    `scale` is one weight a row; None: the rows are the whole optimizer step.
    """
    shapes = {np.shape(array) for array in (log_prob, anchor, advantages, mask, anchor if behav is None else behav)}
    assert len(shapes) == 1, f"log-probabilities, advantages and mask of one case have the shapes {sorted(shapes)}"
    counted = torch.tensor(mask).bool()
    rows = row_index(mask)
    if scale is None:
        scale = sequence_scale(counted.sum(1).numpy(), np.arange(len(counted)), config.aggregation)
    logp = flat(log_prob).to(dtype).requires_grad_()
    batch = Tokens(
        logp=logp,
        prox_logp=flat(anchor).to(dtype),
        behav_logp=flat(anchor if behav is None else behav).to(dtype),
        advantage=flat(advantages).to(dtype),
        mask=counted.flatten(),
        sequence_index=rows,
        scale=torch.tensor(scale, dtype=dtype)[rows],
        entropy=torch.zeros_like(logp.detach()),
    )
    result = policy_loss(batch, config)
    result.loss.backward()
    assert logp.grad is not None
    return result, logp.grad.reshape(counted.shape)


def run_token_losses(
    losses: Any, mask: Any, aggregation: str, scale: Any = None
) -> tuple[Loss, torch.Tensor]:
    """`run_loss` where every token's loss is given: at a ratio of 1 it is minus the advantage."""
    config = ObjectiveConfig.model_validate({"aggregation": aggregation, "correction": {"mode": "none"}})
    same = np.full(np.shape(mask), -1.0).tolist()
    return run_loss(config, same, same, (-np.asarray(losses)).tolist(), mask, scale=scale)
