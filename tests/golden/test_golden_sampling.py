"""Dynamic sampling against the peers' choices: which groups train, and how a batch fills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from golden_cases import Case, golden

from broker import Broker
from common.config import Config
from common.trajectory import Group, Prompt, Response, VersionRun
from generator.rewards import Score, uninformative
from learner.collector import Collector


def rows_by_uid(uids: Sequence[Any]) -> dict[Any, list[int]]:
    return {uid: [row for row, other in enumerate(uids) if other == uid] for uid in dict.fromkeys(uids)}


def kept(groups: dict[Any, list[int]], scores: Sequence[Score]) -> list[Any]:
    return [uid for uid, rows in groups.items() if uninformative([scores[row] for row in rows]) is None]


@golden("dynamic_sampling_filter")
def test_filter_by_correctness_equals_peer_but_for_groups_of_one(case: Case) -> None:
    """The peer keeps a group of one; 0 < #correct < G (Eq. 11) excludes it, and it has no baseline to learn from."""
    groups, accuracy = rows_by_uid(case.inputs["uid"]), case.inputs["acc"]
    theirs = case.outputs["by_acc"]
    wanted = [uid for uid in theirs["kept"] if len(groups[uid]) > 1]
    ours = kept(groups, [Score(float(right), bool(right)) for right in accuracy])
    assert ours == wanted
    kept_rows = {row for row in theirs["kept_idx"] if len(groups[case.inputs["uid"][row]]) > 1}
    assert {row for uid in ours for row in groups[uid]} == kept_rows
    assert len(ours) == theirs["n_prompts"] - (len(theirs["kept"]) - len(wanted))


@golden("dynamic_sampling_filter")
def test_filter_looks_at_correctness_whatever_the_shaped_reward(case: Case) -> None:
    """The peer's `by_seq_final_reward` keeps groups that are all right or all wrong as soon as one response is punished
    for its length: they would teach length only. We judge raw correctness and drop them."""
    groups, accuracy = rows_by_uid(case.inputs["uid"]), case.inputs["acc"]
    shaped = case.inputs["overlong_shaped_reward"]
    ours = kept(groups, [Score(reward, bool(right)) for reward, right in zip(shaped, accuracy, strict=True)])
    mixed = [uid for uid, rows in groups.items() if len({accuracy[row] for row in rows}) == 2]
    assert ours == mixed, "raw correctness alone decides"
    assert set(ours) <= set(case.outputs["by_seq_final_reward"]["kept"])


@golden("dynamic_sampling_filter")
def test_filter_without_correctness_compares_rewards_exactly(case: Case) -> None:
    """Where a reward cannot tell right from wrong we drop groups of equal rewards. The peer's `by_float` keeps such a
    group when its std is rounding noise (three rewards of 0.1), and both its choices keep groups of one: we do not."""
    floats = case.inputs["float_metric_case"]
    for uids, rewards, outputs in (
        (case.inputs["uid"], case.inputs["overlong_shaped_reward"], case.outputs["by_seq_final_reward"]),
        (floats["uid"], floats["val"], case.outputs["by_float"]),
    ):
        groups = rows_by_uid(uids)
        different = [uid for uid in outputs["kept"] if len({rewards[row] for row in groups[uid]}) > 1]
        assert kept(groups, [Score(float(reward), None) for reward in rewards]) == different


@dataclass(frozen=True)
class Filled:
    """Our batch over generation batches that came in one after the other.

    Attributes:
        uids: of the batch; empty where it never filled.
        trajectories: responses in it.
        batches: generation batches until it was full.
        qualified: groups that qualified in the first n generation batches, by n - 1.
        left: uids of the groups that qualified before it was full and are not in it, as the next batch starts.
    """

    uids: list[str]
    trajectories: int
    batches: int
    qualified: list[int]
    left: list[str]


class Fleet:
    """A generator's filter and a learner's collector around a real broker; only the sampling is made up."""

    def __init__(self, config: Config) -> None:
        self.config, self.broker = config, Broker.connect(config)
        self.collector = Collector(self.broker, self.broker.begin(0, ()), config)

    def serve(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Answer `prompts`, each with its responses' correctness; returns how many groups qualified."""
        if not prompts:  # a surplus may need none to fill up
            return 0
        ids = np.array([1, 2], dtype=np.int32)
        position = self.broker.position()
        assert self.broker.release([Prompt(uid, ids, "text") for uid, _ in prompts], position)
        qualified = 0
        for lease, (uid, accuracy) in zip(self.broker.lease("g", len(prompts), 1000), prompts, strict=True):
            assert lease.prompt.group_id == uid
            kind = uninformative([Score(float(right), bool(right)) for right in accuracy])
            if kind is not None:
                assert self.broker.filtered("g", lease.entry_id, kind)
                continue
            responses = tuple(
                Response(ids, np.full(2, -1, np.float32), (VersionRun(0, 0),), "stop", right, right, bool(right))
                for right in map(float, accuracy)
            )
            assert self.broker.submit("g", lease, Group(uid, ids, responses, "g", 1.0, 0.0))
            qualified += 1
        return qualified

    def batch(self, timeout_s: float) -> list[Group] | None:
        batch = self.collector.next(0, timeout_s, threading.Event())
        return None if batch is None else [delivery.group for delivery in batch.deliveries]

    def fill(self, gen_batches: Sequence[Any]) -> Filled:
        wanted, total = self.config.learner.groups_per_step, 0
        qualified: list[int] = []
        for count, prompts in enumerate(gen_batches, start=1):
            total += self.serve(prompts)
            qualified.append(total)
            # Short of groups, a batch must not come, however long we wait; that much waiting shows it.
            groups = self.batch(20.0 if total >= wanted else 0.05)
            assert (groups is not None) == (total >= wanted)
            if groups is None:
                continue
            size = self.config.sampling.group_size
            surplus = total - wanted
            self.serve([(f"more {i}", [1] + [0] * (size - 1)) for i in range((wanted - surplus % wanted) % wanted)])
            left: list[str] = []
            while len(left) < surplus:
                left += [group.group_id for group in self.batch(20.0) or []]
            responses = sum(len(group.responses) for group in groups)
            return Filled([group.group_id for group in groups], responses, count, qualified, left[:surplus])
        return Filled([], 0, 0, qualified, [])

    def close(self) -> None:
        self.collector.close()
        self.broker.close()


@golden("dynamic_sampling_loop")
def test_batch_fills_in_arrival_order_as_the_peers(case: Case, make_config: Callable[..., Config]) -> None:
    """Two differences, both on purpose. The surplus that qualified starts our next batch; the peer throws it away.
    And we have no cap on generation batches: where the peer gives up with an error, our batch is as short as the peer's
    and goes on filling. Without a cap (`max=0`) the peer was given two generation batches."""
    inputs, gen_batches = case.inputs, case.inputs["gen_batches"]
    config = make_config(learner={"groups_per_step": inputs["train_prompt_bsz"]}, sampling={"group_size": inputs["n"]})
    by_seen = {}
    for seen in {2, len(gen_batches)}:
        run = config.run.model_copy(update={"id": f"{config.run.id}-{seen}"})
        with closing(Fleet(config.model_copy(update={"run": run}))) as fleet:
            by_seen[seen] = fleet.fill(gen_batches[:seen])
    caps = {key: int(key.removeprefix("max=").split()[0]) for key in case.outputs}
    assert set(caps.values()) == set(inputs["max_num_gen_batches"])
    for key, outputs in case.outputs.items():
        ours = by_seen[len(gen_batches) if caps[key] else 2]
        if "trained_uids" in outputs:
            assert ours.uids == outputs["trained_uids"], key
            assert ours.trajectories == outputs["n_traj"], key
            assert ours.batches == outputs["num_gen_batches"], key
            assert ours.qualified[-1] == outputs["qualified_total"], key
            assert len(ours.left) == outputs["discarded_qualified"], f"{key}: kept for the next batch, not discarded"
            before = [uid for gen_batch in gen_batches[: ours.batches] for uid, _ in gen_batch]
            assert ours.left == [uid for uid in before if uid in ours.left], f"{key}: in arrival order"
            assert not set(ours.left) & set(ours.uids), key
        elif "error" in outputs:
            short = outputs["num_gen_batches"]
            assert ours.qualified[short - 1] == outputs["num_prompt_in_batch"], key
            assert not ours.uids or ours.batches > short, f"{key}: not full when the peer gives up, and no error"
        else:
            assert outputs["unfinished"] and not ours.uids, key
            assert ours.qualified[-1] == outputs["num_prompt_in_batch"], key
