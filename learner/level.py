"""The rows of one lock-step made even: single responses moved, or exchanged, between its heaviest row and another.

A response that leaves its group pays for its prompt again where it goes, and the costs here count that, so only what
makes the slowest rank faster is done. Promises: the same responses as before, no row above the limit, the heaviest row
never heavier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.batch import TrainSequence
from learner.parts import Part, response_cost, row_cost

_EVEN = 5e-4  # a heaviest row this little above the mean is even
_GAIN = 5e-5  # of the heaviest row; a smaller improvement is none

_Response = tuple[Part, TrainSequence]


@dataclass(frozen=True)
class _Row:
    parts: tuple[Part, ...]

    @property
    def totals(self) -> NDArray[np.float64]:
        """Cost and tokens, (2,)."""
        return np.array([sum(part.cost for part in self.parts), sum(part.tokens for part in self.parts)])

    @property
    def responses(self) -> list[_Response]:
        return [(part, sequence) for part in self.parts for sequence in part.sequences]

    def exchanged(self, given: _Response | None, taken: _Response | None) -> _Row:
        """The row without `given` and with `taken`."""
        members = {part.group.group_id: (part.group, list(part.sequences)) for part in self.parts}
        if given is not None:
            group_id = given[0].group.group_id
            left = [sequence for sequence in members[group_id][1] if sequence.index != given[1].index]
            members[group_id] = (given[0].group, left)
        if taken is not None:
            members.setdefault(taken[0].group.group_id, (taken[0].group, []))[1].append(taken[1])
        return _Row(tuple(Part.of(group, sequences) for group, sequences in members.values() if sequences))


def level(rows: Sequence[Sequence[Part]], limit: int) -> list[list[Part]]:
    """The rows of a lock-step, evened out as far as moves and exchanges can; rows of at most `limit` tokens."""
    even = [_Row(tuple(row)) for row in rows]
    costs = [float(row.totals[0]) for row in even]
    while max(costs) > (1 + _EVEN) * sum(costs) / len(costs):
        heavy = costs.index(max(costs))
        for light in sorted(range(len(rows)), key=costs.__getitem__):
            if light != heavy and (better := _exchange(even[heavy], even[light], limit)):
                even[heavy], even[light] = better
                costs[heavy], costs[light] = (float(row.totals[0]) for row in better)
                break
        else:
            break
    return [list(row.parts) for row in even]


def _exchange(heavy: _Row, light: _Row, limit: int) -> tuple[_Row, _Row] | None:
    """Both rows after the best move of a response from `heavy` to `light`, in exchange for one or for none; None where
    it helps too little."""
    give, back = heavy.responses, light.responses
    leave, arrive = _prices(give, light)
    returned, received = (np.pad(prices, ((0, 0), (0, 1))) for prices in _prices(back, heavy))  # the last one: nothing
    heavier = heavy.totals[:, None, None] - leave[:, :, None] + received[:, None, :]
    lighter = light.totals[:, None, None] + arrive[:, :, None] - returned[:, None, :]
    slower = np.maximum(heavier[0], lighter[0])
    slower[np.maximum(heavier[1], lighter[1]) > limit] = np.inf
    first, second = np.unravel_index(int(slower.argmin()), slower.shape)
    given, taken = give[first], back[second] if second < len(back) else None
    after = heavy.exchanged(given, taken), light.exchanged(taken, given)
    # Prices do not know of another response of the same group that comes the other way; the rows do.
    cost, tokens = np.max([row.totals for row in after], axis=0)
    return after if tokens <= limit and cost <= (1 - _GAIN) * heavy.totals[0] else None


def _prices(responses: Sequence[_Response], other: _Row) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cost and tokens that each response takes from its row by leaving, and those it brings to `other`; (2, responses)
    each. The last of its group takes the prompt along; the first brings it."""
    there = {part.group.group_id for part in other.parts}
    leave, arrive = np.zeros((2, len(responses))), np.zeros((2, len(responses)))
    for index, (part, sequence) in enumerate(responses):
        prompt, length = len(part.group.prompt_ids), sequence.tokens
        own = response_cost(prompt, length), length
        whole = own[0] + row_cost(prompt), own[1] + prompt
        leave[:, index] = whole if len(part.sequences) == 1 else own
        arrive[:, index] = own if part.group.group_id in there else whole
    return leave, arrive
