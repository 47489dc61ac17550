"""Which responses go into which row: rows under a hard limit of tokens, even over ranks that run in lock-step.

Whole groups compute their prompt once but balance worst; single responses balance best and repeat their prompt. So
groups are cut in several ways (`_CUTS`), dealt longest first over all bins, sorted and dealt a rank's worth at a time,
made even within each lock-step (`learner.level`), and the layout whose slowest ranks cost least in sum is taken. A
repeated prompt counts as what it costs. A large step needs none of this: its rows are so many that neighbours are even.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import HeadraceError
from learner.balance import EFFORT, deal, fills, longest_first, spread
from learner.batch import Step
from learner.level import level
from learner.parts import LINEAR_COST, Part, merge

LockSteps = list[list[list[Part]]]

# Ways to cut: the size of parts, as a share of the limit; the share of groups cut into single responses, to fill in;
# and how full rows are made before they are evened out, which full ones cannot be.
Cut = tuple[float, float, float]
_CUTS: list[Cut] = [
    *((size, share, full) for size, full in ((1, 1), (0.85, 0.85), (0.5, 1)) for share in (0, 1 / 16, 1 / 8, 1 / 4)),
    (0.25, 0, 1), (0.125, 0, 1), (0, 1, 1),
]  # fmt: skip
# Responses for which all ways of cutting are tried, in some 0.3 s; with more only the first.
_SEARCHED = 1024
# A layout this much above even work with every prompt once is good enough.
_GOOD = 1.001


def layout(step: Step, ranks: int, limit: int) -> LockSteps:
    """The parts in every row of every lock-step, a row per rank, none of more than `limit` tokens.

    Raises:
        HeadraceError: one prompt with its longest response exceeds `limit`.
    """
    groups = _trained(step)
    longest = max([len(group.group.prompt_ids) + max(group.lengths) for group in groups], default=1)
    if longest > limit:
        raise HeadraceError(
            f"a prompt with one response has {longest} tokens, more than learner.micro_batch_tokens times "
            f"learner.sequence_parallel ({limit}); use at least {longest}"
        )
    groups.sort(key=lambda group: len(group.group.prompt_ids))  # those whose prompts cost least are cut first
    good = _GOOD * sum(group.cost for group in groups) / ranks
    best = _cut_and_assign(groups, _CUTS[0], ranks, limit, 0)
    if sum(len(group.sequences) for group in groups) > _SEARCHED or _slowest(best) <= good:
        return best
    return _search(groups, ranks, limit, good)


def _search(groups: Sequence[Part], ranks: int, limit: int, good: float) -> LockSteps:
    """The best of all ways of cutting, each made even; the best again with a longer search for even bins."""
    best: LockSteps = []
    best_cut, cost = _CUTS[0], float("inf")
    for number in range(len(_CUTS) + 1):
        cut, effort = (_CUTS[number], 0) if number < len(_CUTS) else (best_cut, EFFORT)
        found = [level(rows, limit) for rows in _cut_and_assign(groups, cut, ranks, limit, effort)]
        if _slowest(found) < cost:
            best, best_cut, cost = found, cut, _slowest(found)
        if cost <= good:
            return best
    return [level(rows, limit, deep=True) for rows in best]


def _slowest(lock_steps: LockSteps) -> float:
    """Cost of the slowest ranks, summed over lock-steps."""
    return sum(max(sum(part.cost for part in row) for row in rows) for rows in lock_steps)


def _cut_and_assign(groups: Sequence[Part], cut: Cut, ranks: int, limit: int, effort: int) -> LockSteps:
    size, single = int(cut[0] * limit), round(cut[1] * len(groups))
    parts = [part for index, group in enumerate(groups) for part in _cut(group, 0 if index < single else size)]
    weights = [round(part.cost / LINEAR_COST) for part in parts]
    sizes = [part.tokens for part in parts]
    bins = assign(sizes, ranks, max([int(cut[2] * limit), *sizes]), effort, weights)
    return [[merge([parts[item] for item in row]) for row in rows] for rows in bins]


def _trained(step: Step) -> list[Part]:
    """Groups with the sequences that have an unmasked token; the others would be computed for nothing."""
    if step.tokens_of_sequence.all():
        return [Part.of(group, group.sequences) for group in step.groups]
    kept = ((group, [s for s in group.sequences if step.tokens_of_sequence[s.index]]) for group in step.groups)
    return [Part.of(group, sequences) for group, sequences in kept if sequences]


def _cut(group: Part, size: int) -> list[Part]:
    """The group's responses in parts of at most `size` tokens, prompt included, but of one response at least; as even
    as longest-first makes them."""
    if group.tokens <= size:
        return [group]
    lengths = group.lengths
    room = max(size - len(group.group.prompt_ids), max(lengths))
    order, count = longest_first(lengths), -(-sum(lengths) // room)
    while max(fills(bins := deal(order, lengths, count), lengths)) > room:
        count += 1
    return [Part.of(group.group, [group.sequences[i] for i in items], [lengths[i] for i in items]) for items in bins]


def assign(
    sizes: Sequence[int], ranks: int, limit: int, effort: int = EFFORT, weights: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Items spread over all bins; then bins in order of their weight, dealt a rank's worth at a time.

    Args:
        sizes: tokens of every item, none above `limit`.
        ranks: bins that run in lock-step.
        limit: tokens a bin may hold; hard.
        effort: of the search (`learner.balance.spread`).
        weights: what is to be even among the bins; None: tokens.

    Returns:
        lock-steps, each of `ranks` bins, each a list of item indices; as few lock-steps as longest-first fits into, or
        a sixteenth more.
    """
    weights = sizes if weights is None else weights
    order = longest_first(weights)
    lone = sum(2 * size > limit for size in sizes)  # no two of these share a bin
    lock_steps = max(1, -(-max(lone * limit, sum(sizes)) // (limit * ranks)))
    while max(fills(bins := deal(order, weights, lock_steps * ranks), sizes)) > limit:
        lock_steps += 1 + lock_steps // 16
    if effort and max(fills(searched := spread(weights, lock_steps * ranks, effort), sizes)) <= limit:
        bins = searched
    bins.sort(key=lambda items: -sum(weights[item] for item in items))
    return [bins[first : first + ranks] for first in range(0, len(bins), ranks)]
