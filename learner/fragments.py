"""What this rank holds of every parameter and of its optimizer state under ZeRO 0 to 3, and the way to whole tensors.

DeepSpeed lays parameters into flat partitions that depend on stage and ranks. A `Fragment` says which part of which
parameter lies where; from there on stage and ranks do not matter: `gather` makes whole tensors on rank 0, `spread`
brings whole tensors into whatever partitions there are now. Both go parameter by parameter: beside what they are asked
for there is never more than one whole tensor. Every rank takes part.

DeepSpeed's own `safe_set_full_*` fail for parameters that the ranks of ZeRO-3 do not divide, and know no optimizer
state before the first step, which is when a resumed run needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner import lora

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"


@dataclass(frozen=True)
class Fragment:
    """`length` elements of a flattened parameter from `start` on; they lie in `flat` from `offset` on.

    `flat` is the tensor the optimizer steps, float32, and its key in the optimizer's state."""

    flat: Tensor
    offset: int
    start: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """This fragment's part of a tensor laid out as `flat`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


class Fragments:
    """Trained parameters of one DeepSpeed engine with an AdamW optimizer that was given to it.

    Args:
        engine: the DeepSpeed engine.
        stage: its ZeRO stage.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self._engine, self._stage = engine, stage
        self._state = engine.basic_optimizer.state
        named = engine.module.named_parameters()
        self.parameters: dict[str, Any] = {lora.saved_name(name): each for name, each in named if each.requires_grad}

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter, whatever of it is here."""
        parameter = self.parameters[name]
        shape: torch.Size = parameter.ds_shape if self._stage == 3 else parameter.shape
        return shape

    @property
    def step(self) -> int:
        """Optimizer updates made so far."""
        return max((int(self._state[flat]["step"]) for flat in self._flats() if flat in self._state), default=0)

    def gather(self, kind: str) -> Iterator[tuple[str, Tensor | None]]:
        """Whole tensors of one kind, `WEIGHT` or a moment, in float32 on rank 0's CPU; None on the others."""
        alone = self._stage == 0 or dist.get_world_size() == 1
        for name in self.parameters:
            shape = self.shape(name)
            whole = None
            if not alone or dist.get_rank() == 0:
                whole = torch.zeros(shape.numel(), dtype=torch.float32, device=self._engine.device)
                if (fragment := self._fragment(name)) is not None:
                    held = self._held(fragment, kind)
                    if held is not None:
                        whole.narrow(0, fragment.start, fragment.length).copy_(held)
            if not alone and whole is not None:
                dist.reduce(whole, dst=0)  # each element is on one rank, and zero on the others
            yield name, whole.view(shape).cpu() if whole is not None and dist.get_rank() == 0 else None

    def spread(self, kind: str, read: Callable[[str], Tensor] | None, source: int) -> None:
        """Bring whole tensors of one kind into the partitions.

        Args:
            kind: `WEIGHT` or a moment.
            read: a parameter's whole tensor; on rank `source`, None elsewhere.
            source: the rank that reads.
        """
        for name in self.parameters:
            whole = torch.empty(self.shape(name), dtype=torch.float32, device=self._engine.device)
            if read is not None:
                whole.copy_(read(name))
            dist.broadcast(whole, src=source)
            if (fragment := self._fragment(name)) is not None and (held := self._held(fragment, kind)) is not None:
                held.copy_(whole.view(-1).narrow(0, fragment.start, fragment.length))

    def make_state(self, step: int) -> None:
        """Optimizer state as after `step` updates, moments zero, for `spread` to fill. AdamW makes it in its first."""
        for flat in self._flats():
            self._state[flat] = {
                "step": torch.tensor(float(step), dtype=torch.float32),
                **{moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS},
            }

    def publish(self) -> None:
        """After `spread(WEIGHT)`: the weights the model computes with become those the optimizer steps."""
        optimizer = self._engine.optimizer
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            for parameter in self.parameters.values():
                group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                flat = optimizer.fp32_partitioned_groups_flat[group]
                parameter.ds_tensor.data.copy_(flat.detach().narrow(0, offset, length))
            if persistent := optimizer.persistent_parameters:  # small ones, of which every rank keeps the whole
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)

    def _flats(self) -> list[Tensor]:
        """The tensors the optimizer steps."""
        if self._stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [flat for group in self._engine.basic_optimizer.param_groups for flat in group["params"]]

    def _held(self, fragment: Fragment, kind: str) -> Tensor | None:
        """What is here of a kind; None: no optimizer state yet."""
        if kind == WEIGHT:
            return fragment.of(fragment.flat)
        state = self._state.get(fragment.flat)
        return fragment.of(state[kind]) if state else None

    def _fragment(self, name: str) -> Fragment | None:
        """What this rank holds of a parameter; None: nothing."""
        parameter, optimizer = self.parameters[name], self._engine.optimizer
        if self._stage == 0:
            return Fragment(parameter, 0, 0, parameter.numel())
        if self._stage == 3:
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank(group=parameter.ds_process_group) * length
            left = parameter.ds_numel - start  # the last partition is padded
            flat = optimizer.fp32_partitioned_groups_flat[group]
            return Fragment(flat, offset, start, min(length, left)) if left > 0 else None
        if (mapping := parameter._hp_mapping) is None:
            return None
        (flat,) = self._engine.basic_optimizer.param_groups[mapping.param_group_index]["params"]
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(flat, here.start, there.start, there.numel)
