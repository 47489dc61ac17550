"""The rows of one lock-step made even: single responses moved, or exchanged, between its heaviest row and another.

A response that leaves its group pays for its prompt again where it goes, and the costs here count that, so only what
makes the slowest rank faster is done. Promises: the same responses as before, no row above the limit, the heaviest row
never heavier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from learner.batch import TrainSequence
from learner.parts import Part, response_cost, row_cost

_EVEN = 5e-4  # a heaviest row this little above the mean is even
_GAIN = 5e-5  # of the heaviest row; a smaller improvement is none
_TRIED = 6  # exchanges that are tried as the first of two

_Response = tuple[Part, TrainSequence]


@dataclass(frozen=True)
class _Row:
    parts: tuple[Part, ...]

    @property
    def cost(self) -> float:
        return sum(part.cost for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def totals(self) -> NDArray[np.float64]:
        """Cost and tokens, (2,)."""
        return np.array([self.cost, self.tokens])

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


def level(rows: Sequence[Sequence[Part]], limit: int, deep: bool = False) -> list[list[Part]]:
    """The rows of a lock-step, evened out as far as moves and exchanges can; rows of at most `limit` tokens. `deep`:
    where one exchange does not help, two in a row may."""
    even = [_Row(tuple(row)) for row in rows]
    costs = [row.cost for row in even]
    while max(costs) > (1 + _EVEN) * sum(costs) / len(costs):
        heavy = costs.index(max(costs))
        lighter = sorted(set(range(len(rows))) - {heavy}, key=costs.__getitem__)
        for find, light in product([_exchange, _exchange_twice] if deep else [_exchange], lighter):
            if better := find(even[heavy], even[light], limit):
                even[heavy], even[light] = better
                costs[heavy], costs[light] = (row.cost for row in better)
                break
        else:
            break
    return [list(row.parts) for row in even]


def _exchange(heavy: _Row, light: _Row, limit: int) -> tuple[_Row, _Row] | None:
    """Both rows after the best move of a response from `heavy` to `light`, in exchange for one or for none; None where
    it helps too little."""
    after = next(_exchanges(heavy, light, limit, 1), None)
    return after if after and _slower(after) <= (1 - _GAIN) * heavy.cost else None


def _exchange_twice(heavy: _Row, light: _Row, limit: int) -> tuple[_Row, _Row] | None:
    """The same with two exchanges, of which the first alone does not help."""
    found = []
    for first in _exchanges(heavy, light, limit, _TRIED):
        one, other = sorted(first, key=lambda row: -row.cost)
        found += [second if one is first[0] else second[::-1] for second in _exchanges(one, other, limit, 1)]
    best = min(found, key=_slower, default=None)
    return best if best and _slower(best) <= (1 - _GAIN) * heavy.cost else None


def _slower(rows: tuple[_Row, ...]) -> float:
    return max(row.cost for row in rows)


def _exchanges(heavy: _Row, light: _Row, limit: int, most: int) -> Iterator[tuple[_Row, _Row]]:
    """Both rows after each of the best moves or exchanges, the best first."""
    give, back = heavy.responses, light.responses
    leave, arrive = _prices(give, light)
    returned, received = (np.pad(prices, ((0, 0), (0, 1))) for prices in _prices(back, heavy))  # the last one: nothing
    heavier = heavy.totals[:, None, None] - leave[:, :, None] + received[:, None, :]
    lighter = light.totals[:, None, None] + arrive[:, :, None] - returned[:, None, :]
    slower = np.maximum(heavier[0], lighter[0])
    slower[np.maximum(heavier[1], lighter[1]) > limit] = np.inf
    for flat in np.argsort(slower, axis=None)[:most]:
        first, second = np.unravel_index(int(flat), slower.shape)
        given, taken = give[first], back[second] if second < len(back) else None
        after = heavy.exchanged(given, taken), light.exchanged(taken, given)
        # Prices do not know of another response of the same group that comes the other way; the rows do.
        if max(row.tokens for row in after) <= limit:
            yield after


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
