"""Access to the reference numbers: which tests run over which cases, and how numbers are compared.

A case's `second` setting becomes a case of its own. Ids may carry a suffix after the name a test asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from common.config import ObjectiveConfig
from learner.batch import sequence_scale
from learner.objective import Loss, Tokens, policy_loss

DEFAULT_FILE = Path(__file__).with_name("dapo_golden.json")
Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Case:
    id: str
    inputs: dict[str, Any]
    outputs: Any


def golden(name: str) -> Callable[[Test], Test]:
    """Run the test once per case whose id is `name`, or starts with it."""

    def mark(test: Test) -> Test:
        test.golden_name = name  # type: ignore[attr-defined]
        return test

    return mark


def load(path: Path) -> list[Case]:
    cases = []
    for raw in json.loads(path.read_text())["cases"]:
        inputs, outputs = dict(raw["inputs"]), raw["outputs"]
        second_in = inputs.pop("second", None)
        if second_in is not None:
            outputs = dict(outputs)
            second_out = outputs.pop("second")
            cases.append(Case(f"{raw['id']}-second", {**inputs, **second_in}, second_out))
        cases.append(Case(raw["id"], inputs, outputs))
    return cases


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Tolerance D of the reference (float64 peers); pass others where a case says so."""
    if isinstance(ours, torch.Tensor):
        ours = ours.detach().numpy()
    np.testing.assert_allclose(np.asarray(ours, dtype=np.float64), np.asarray(theirs, np.float64), rtol=rtol, atol=atol)


def flat(rows: Any) -> torch.Tensor:
    """A (rows, positions) list as one float64 tensor of all its entries."""
    return torch.tensor(rows, dtype=torch.float64).flatten()


def objective(inputs: dict[str, Any], **fields: Any) -> ObjectiveConfig:
    """The objective a case describes, without correction unless `fields` says otherwise."""
    fields.setdefault("correction", {"mode": "none"})
    fields.setdefault("dual_clip", inputs.get("clip_ratio_c"))
    low, high = (inputs["clip_low"], inputs["clip_high"]) if "clip_low" in inputs else inputs.get("clip", [0.2, 0.28])
    fields.setdefault("clip_low", low)
    fields.setdefault("clip_high", high)
    return ObjectiveConfig.model_validate(fields)


def run_loss(
    config: ObjectiveConfig, log_prob: Any, anchor: Any, advantages: Any, mask: Any, behav: Any = None
) -> tuple[Loss, torch.Tensor]:
    """The loss over a (rows, positions) case, and its gradient with respect to log_prob, in that shape."""
    shape = np.shape(mask)
    counted = torch.tensor(mask, dtype=torch.bool)
    rows = torch.arange(shape[0]).repeat_interleave(shape[1])
    scale = torch.from_numpy(
        sequence_scale(counted.sum(1).numpy(), np.arange(shape[0], dtype=np.int64), config.aggregation)
    )
    logp = flat(log_prob).requires_grad_()
    batch = Tokens(
        logp=logp,
        prox_logp=flat(anchor),
        behav_logp=flat(anchor if behav is None else behav),
        advantage=flat(advantages),
        mask=counted.flatten(),
        sequence_index=rows,
        scale=scale[rows],
        entropy=torch.zeros_like(logp.detach()),
    )
    result = policy_loss(batch, config)
    result.loss.backward()
    assert logp.grad is not None
    return result, logp.grad.reshape(shape)
