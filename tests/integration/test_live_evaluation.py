"""Evaluation during training: rounds in Redis, the coordinator that runs them, the generators that answer them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import yaml
from broker_helpers import MakeConfig, TwiceBroker
from typer.testing import CliRunner

from broker import Broker, EvalLease, Sourced
from broker.evaluator import Evaluator, summarise
from broker.records import EvalResult, EvalRound
from broker.service import run_service
from common.cli import app
from common.config import Config
from common.log import Logger
from common.trajectory import EvalAnswer, EvalAnswers, Prompt, VersionRun
from generator.engine import Sampled
from generator.live import LiveEvaluation
from generator.rewards import DataFailure, Score

PROMPTS = [Sourced(np.array([1, 2, i], dtype=np.int32), f"{i} + 1 =", {"answer": str(i + 1)}) for i in range(4)]
EVAL = {"prompts": {"type": "reasoning_gym", "task": "chain_sum", "size": 4, "seed": 9}, "every": 5, "limit": 3}


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(eval=EVAL, broker={"lease_ttl_s": 0.02, "member_ttl_s": 0.02})


@pytest.fixture
def broker(config: Config) -> Iterator[Broker]:
    connected = Broker.connect(config)
    yield connected
    connected.close()


@pytest.fixture(autouse=True)
def _lines_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)  # other tests' set-up switched it off


def coordinator(broker: Broker) -> Evaluator:
    assert broker.config.eval is not None
    return Evaluator(broker, broker.config.eval, PROMPTS, Logger(broker.config.run.run_id, "broker"))


def answers(lease: EvalLease, correct: bool = True, version: int | None = None) -> EvalAnswers:
    version = lease.version if version is None else version
    return EvalAnswers(lease.version, lease.index, (EvalAnswer(4, False, 1.0, correct, lease.version, version),))


def lease(broker: Broker, consumer: str = "g1", version: int = 99) -> EvalLease:
    found = broker.lease_evaluation(consumer, version)
    assert found is not None
    return found


def answer_all(broker: Broker, consumer: str = "g1") -> int:
    count = 0
    while found := broker.lease_evaluation(consumer, 99):
        assert broker.answer_evaluation(found.entry_id, answers(found))
        count += 1
    return count


def records(config: Config) -> list[dict[str, Any]]:
    path = config.run.folder / "eval.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- rounds in Redis


def test_round_is_released_once_whoever_looks_and_however_often(broker: Broker) -> None:
    for each in (coordinator(broker), coordinator(broker)):
        each.look()
        each.look()
    opened = broker.evaluation().open
    assert opened is not None and (opened.version, opened.prompts, opened.answered) == (0, 3, 0)
    assert broker._client.xlen(broker.keys.eval) == 3


def test_two_generators_share_a_round_and_the_coordinator_reports_it(broker: Broker, config: Config) -> None:
    each = coordinator(broker)
    broker.begin(10, [])
    each.look()
    first, second, third = lease(broker, "g1"), lease(broker, "g2"), None
    assert broker.answer_evaluation(second.entry_id, answers(second, correct=False, version=11))
    third = lease(broker, "g2")
    assert [each.prompt.text for each in (first, second, third)] == ["0 + 1 =", "1 + 1 =", "2 + 1 ="]
    for held in (first, third):
        assert broker.answer_evaluation(held.entry_id, answers(held))
    each.look()
    each.look()
    (record,) = records(config)
    assert record.pop("seconds") >= 0
    assert record == {
        "step": 10, "version": 10, "accuracy": pytest.approx(2 / 3), "standard_error": pytest.approx(1 / 3),
        "reward_mean": 1.0, "response_length_mean": 4.0, "truncated_share": 0.0, "oldest_version": 10,
        "newest_version": 11, "prompts": 3, "samples": 1, "not_scored": 0,
    }  # fmt: skip
    each.close()
    assert list((config.run.folder / "tensorboard" / "eval").iterdir())
    each.close()


def test_evaluation_is_no_part_of_ledger_budget_and_queues_and_leaves_no_keys(broker: Broker) -> None:
    ledger, queues = broker.ledger(), broker.queues()
    each = coordinator(broker)
    each.look()
    lease(broker)
    assert (broker.ledger(), broker.queues(), broker.position()) == (ledger, queues, 0)
    assert broker.lease("g1", 1, 0) == []
    assert answer_all(broker) == 3
    each.look()
    each.close()
    assert (broker.ledger(), broker.queues()) == (ledger, queues)
    assert broker._client.xlen(broker.keys.eval) == 0
    assert broker._client.xpending(broker.keys.eval, "generators")["pending"] == 0
    assert not broker._client.exists(broker.keys.answers)
    assert set(broker._client.hkeys(broker.keys.rounds)) == {b"last", b"result"}


def test_generator_older_than_the_round_gets_none_of_it(broker: Broker) -> None:
    broker.begin(5, [])
    coordinator(broker).look()
    assert broker.lease_evaluation("g1", 4) is None
    assert lease(broker, version=5).version == 5


def test_generator_that_lost_a_lease_on_the_way_gets_it_again(broker: Broker) -> None:
    coordinator(broker).look()
    assert lease(broker).entry_id == lease(broker).entry_id
    assert lease(broker, "g2").index == 1


def test_dead_generator_s_prompt_is_taken_over_and_its_late_answer_discarded(broker: Broker) -> None:
    coordinator(broker).look()
    dead = lease(broker, "dead")
    assert [lease(broker, f"g{i}").index for i in (1, 2)] == [1, 2]
    taken: set[str] = set()
    while "dead" not in taken:
        taken |= {consumer for _, consumer in broker.reclaim()}
    found = {}
    while again := broker.lease_evaluation("g3", 0):
        found[again.index] = again
        assert broker.answer_evaluation(again.entry_id, answers(again))
    assert dead.index in found
    assert not broker.answer_evaluation(dead.entry_id, answers(dead, correct=False))
    assert all(answer.correct for each in broker.evaluation_answers() for answer in each.answers)


def test_renewed_lease_is_not_taken_back(make_config: MakeConfig) -> None:
    broker = Broker.connect(make_config(eval=EVAL, broker={"lease_ttl_s": 0.2, "member_ttl_s": 0.2}))
    coordinator(broker).look()
    held, other = lease(broker, "g1"), lease(broker, "g2")
    while not (taken := broker.reclaim()):
        broker.renew_evaluation("g1", held.entry_id)
    assert taken == [(other.entry_id, "g2")]
    broker.close()


def test_answers_that_come_first_count_even_after_a_takeover(broker: Broker) -> None:
    coordinator(broker).look()
    slow = lease(broker, "slow")
    while not broker.reclaim():
        pass
    assert broker.answer_evaluation(slow.entry_id, answers(slow))
    assert {found.index for found in (lease(broker, "g1"), lease(broker, "g2"))} == {1, 2}
    assert broker.lease_evaluation("g3", 0) is None


def test_every_call_of_a_round_sent_twice_counts_once(config: Config) -> None:
    broker = TwiceBroker.connect(config)
    each = coordinator(broker)
    each.look()
    assert answer_all(broker) == 3
    each.look()
    assert [record["step"] for record in records(config)] == [0]
    assert broker.evaluation().open is None
    each.close()
    broker.close()


def test_prompt_that_cannot_be_read_is_left_without_answers(broker: Broker) -> None:
    coordinator(broker).look()
    entry_id, fields = broker._client.xrange(broker.keys.eval)[0]
    broker._client.xdel(broker.keys.eval, entry_id)
    broker._client.xadd(broker.keys.eval, {**fields, b"p": b"?"})
    for _ in range(2):
        found = lease(broker)
        broker.answer_evaluation(found.entry_id, answers(found))
    assert broker.lease_evaluation("g1", 0) is None
    opened = broker.evaluation().open
    assert opened is not None and opened.complete
    assert summarise(opened, broker.evaluation_answers(), 1).not_scored == 1


# -- the coordinator


def test_coordinator_started_again_goes_on_with_the_round(broker: Broker, config: Config) -> None:
    coordinator(broker).look()
    found = lease(broker)
    broker.answer_evaluation(found.entry_id, answers(found))
    second = coordinator(broker)
    second.look()
    assert answer_all(broker) == 2
    second.look()
    third = coordinator(broker)
    third.look()
    assert broker.evaluation().open is None, "no second round of one version"
    assert [(record["step"], record["prompts"]) for record in records(config)] == [(0, 3)]
    second.close()


def test_coordinator_that_dies_after_writing_writes_no_second_record(
    broker: Broker, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = coordinator(broker)
    first.look()
    answer_all(broker)
    with monkeypatch.context() as patch:
        patch.setattr(broker, "end_evaluation", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            first.look()
    coordinator(broker).look()
    state = broker.evaluation()
    assert state.open is None and state.result is not None and state.result.version == 0
    assert len(records(config)) == 1
    first.close()


def test_round_due_while_another_is_open_is_skipped_and_said_once(
    broker: Broker, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    each = coordinator(broker)
    for version in (0, 4, 5, 6):
        broker.begin(version, [])
        each.look()
    coordinator(broker).look()
    assert caplog.text.count("evaluation at version 5 is skipped") == 1
    answer_all(broker)
    each.look()
    assert broker.evaluation().open is None, "the skipped one is not made up for"
    broker.begin(11, [])  # 10 went by unseen
    each.look()
    answer_all(broker)
    each.look()
    assert [record["step"] for record in records(config)] == [0, 11]
    each.close()


def test_learner_back_at_older_weights_ends_the_round_of_the_lost_ones(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    each = coordinator(broker)
    broker.begin(10, [])
    each.look()
    broker.begin(7, [])
    each.look()
    assert "evaluation at version 10: 0 of 3 prompts answered, and no more will be" in caplog.text
    opened = broker.evaluation().open
    assert opened is not None and (opened.version, opened.answered) == (7, 0)
    assert lease(broker).version == 7
    assert broker._client.xlen(broker.keys.eval) == 3


def test_round_open_at_the_end_is_reported_incomplete_and_forgotten(
    broker: Broker, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    each = coordinator(broker)
    each.look()
    late = lease(broker)
    assert broker.answer_evaluation(late.entry_id, answers(late))
    held = lease(broker)
    each.finish()
    assert "evaluation at version 0: 1 of 3 prompts answered, and no more will be: incomplete" in caplog.text
    assert broker.evaluation().open is None and records(config) == []
    assert not broker.answer_evaluation(held.entry_id, answers(held))
    assert not broker._client.exists(broker.keys.answers) and not broker._client.xlen(broker.keys.eval)
    assert broker.begin_evaluation(0, [found.prompt for found in (late, held)]) == "over"
    assert broker.lease_evaluation("g1", 0) is None


def test_service_evaluates_before_the_first_version_and_every_n(make_config: MakeConfig, tiny_model: Any) -> None:
    config = make_config(model={"path": str(tiny_model)}, eval=EVAL, broker={"heartbeat_s": 0.02})
    broker = Broker.connect(config)
    stop = threading.Event()
    service = threading.Thread(target=run_service, args=(config, stop), daemon=True)
    service.start()
    for version in (0, 3, 5):
        broker.begin(version, [])
        while version != 3 and ((state := broker.evaluation()).last != version or state.open is not None):
            answer_all(broker)
            broker.wait_event("$", 20)
    broker.begin(10, [])
    while broker.evaluation().last != 10:
        broker.wait_event("$", 20)
    broker.finish()
    service.join(10)
    assert not service.is_alive()
    assert [record["step"] for record in records(config)] == [0, 5]
    assert broker.evaluation().open is None
    assert broker.ledger().released == broker.ledger().outstanding == config.max_outstanding
    broker.close()


def test_status_shows_the_last_result_and_the_open_round(broker: Broker, config: Config, tmp_path: Any) -> None:
    each = coordinator(broker)
    each.look()
    answer_all(broker)
    each.look()
    broker.begin(5, [])
    each.look()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    output = CliRunner().invoke(app, ["status", str(path)]).output
    assert "evaluation at version 0: accuracy 1.000 +- 0.000 (3 prompts x 1, answered by version 0, " in output
    assert "evaluation at version 5: 0 of 3 prompts answered" in output
    each.close()


# -- what a round measured


def _summary(*rows: list[tuple[float | None, bool | None]]) -> EvalResult:
    prompts = [
        EvalAnswers(4, i, tuple(EvalAnswer(2, True, reward, correct, 4, 6) for reward, correct in row))
        for i, row in enumerate(rows)
    ]
    return summarise(EvalRound(4, len(rows), len(rows), 1.5), prompts, 2)


def test_summary_counts_failed_answers_as_not_correct_and_not_as_rewards() -> None:
    result = _summary([(0.5, True), (None, None)], [(0.1, False), (0.3, True)], [])
    assert (result.accuracy, result.not_scored) == (pytest.approx(1 / 3), 3)
    assert result.reward_mean == pytest.approx(0.3)
    assert result.standard_error == pytest.approx(np.std([0.5, 0.5, 0], ddof=1) / 3**0.5)
    assert "accuracy 0.333" in str(result) and "answered by versions 4-6, 3 not scored, 1.5 s)" in str(result)


def test_summary_without_judgement_gives_the_reward_instead() -> None:
    result = _summary([(1.0, None), (None, None)], [(0.0, None), (0.5, None)], [(None, None)] * 2)
    assert result.accuracy is None
    assert result.standard_error == pytest.approx(np.std([1.0, 0.25], ddof=1) / 2**0.5)
    assert "reward 0.500" in str(result)
    assert "nothing scored" in str(_summary([(None, None)] * 2))


# -- the generator


class PlainEngine:
    """Answers with the text of a function of the prompt; notes what it was asked."""

    def __init__(self, text: Callable[[list[int]], str]) -> None:
        self.version, self.asked, self._text = 3, [], text  # type: ignore[var-annotated]

    async def sample(self, request_id: str, prompt_ids: Any, n: int, **parameters: Any) -> list[Sampled]:
        self.asked.append((request_id, parameters))
        text = self._text(prompt_ids.tolist())
        runs = (VersionRun(3, 0), VersionRun(4, 1))
        one = Sampled(np.array([7, 8], dtype=np.int32), np.zeros(2, dtype=np.float32), runs, "length", text)
        return [one] * n


class PlainRewards:
    async def score(self, prompt: Prompt, completions: list[str]) -> list[Score]:
        if "?" in completions:
            raise DataFailure("the reward raised", "reward_raised")
        right = [text == prompt.columns["answer"] for text in completions]
        return [Score(float(each), each) for each in right]


def _text(token_ids: list[int]) -> str:
    if token_ids[-1] == 2:
        raise DataFailure("vLLM refused the prompt", "prompt")
    return {0: "1", 1: "?"}[token_ids[-1]]


async def test_generator_answers_with_the_eval_parameters_in_turn_for_a_slot(make_config: MakeConfig) -> None:
    config = make_config(eval={**EVAL, "samples": 2, "temperature": 0.5, "top_p": 0.7, "max_response_tokens": 9})
    broker = Broker.connect(config)
    coordinator(broker).look()
    engine, slots = PlainEngine(_text), asyncio.Semaphore(1)
    part = LiveEvaluation(config, "g1", broker, engine, PlainRewards(), Logger("r", "g1"))  # type: ignore[arg-type]
    await slots.acquire()  # a training prompt
    task = asyncio.create_task(part.run(slots))
    while part.held is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.asked == []
    slots.release()
    while not (opened := (await asyncio.to_thread(broker.evaluation)).open) or not opened.complete:
        assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    scored = EvalAnswer(2, True, 1.0, True, 3, 4)
    failed = EvalAnswer(2, True, None, None, 3, 4)
    expected = [EvalAnswers(0, 0, (scored,) * 2), EvalAnswers(0, 1, (failed,) * 2), EvalAnswers(0, 2, ())]
    assert sorted(broker.evaluation_answers(), key=lambda each: each.index) == expected
    assert [parameters for _, parameters in engine.asked] == [{"temperature": 0.5, "top_p": 0.7, "max_tokens": 9}] * 3
    broker.close()
