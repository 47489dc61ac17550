"""The critic's model on packed rows, and what a trainer does without when the objective does not ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learner_inputs import make_config, make_group, tiny_model

from learner.batch import build_step
from learner.logprobs import row_inputs
from learner.models import CriticModel
from learner.packing import Packed, plan
from learner.sequence import ALONE
from learner.trainer import Trainer


def values(critic: CriticModel, row: Packed) -> torch.Tensor:
    predict_from, inputs = row_inputs(ALONE.part(row), torch.device("cpu"))
    out: torch.Tensor = critic(predict_from=predict_from, **inputs)
    return out


@pytest.mark.parametrize("limit", [30, 200])
def test_values_of_packed_rows_equal_those_of_the_state_before_each_token(limit: int) -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(rng, str(i), prompt, [3, 9, 1]) for i, prompt in enumerate((7, 1))]
    step = build_step(groups, make_config(), 0)
    critic = CriticModel(tiny_model())
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.5)
    plain = {}
    for group in step.groups:
        for sequence in group.sequences:
            ids = torch.tensor(np.concatenate([group.prompt_ids, sequence.token_ids])).long()
            hidden = critic.body(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            before = hidden[len(group.prompt_ids) - 1 : -1]
            plain[sequence.index] = before @ critic.head.weight[0] + critic.head.bias
    for row in plan(step, 1, limit)[0]:
        order = list(dict.fromkeys(row.sequence_index.tolist()))
        torch.testing.assert_close(values(critic, row), torch.cat([plain[i] for i in order]), rtol=0, atol=1e-5)


def test_values_zero_at_the_start_and_connected_without_targets() -> None:
    critic = CriticModel(tiny_model(dtype=torch.bfloat16))
    step = build_step([make_group(np.random.default_rng(0), "a", 4, [3, 5])], make_config(), 0)
    rows = [share[0] for share in plan(step, 3, 100)]
    assert sorted(len(row.targets) for row in rows)[0] == 0
    for row in rows:
        out = values(critic, row)
        assert out.dtype == torch.float32 and not out.any()
        critic.zero_grad()
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in critic.parameters())


@pytest.mark.parametrize(
    ("updates", "correction", "needed"),
    [
        (1, {}, False),
        (2, {}, True),
        (2, {"proximal": "interpolated"}, False),
        (2, {"mode": "bypass"}, False),
        (1, {"token_mask": [0.5, 2.0]}, True),
    ],
)
def test_proximal_pass_only_where_it_is_needed(updates: int, correction: dict[str, Any], needed: bool) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.config = make_config(
        objective={"correction": correction}, learner={"groups_per_step": 2, "updates_per_batch": updates}
    )
    assert trainer.needs_proximal_pass is needed
