"""Evaluation during training, the coordinator's part: begins rounds as the policy's version goes up, and reports them.

Every `eval.every` versions, and before the first, the held-out prompts go to the generators of the run, which answer
them beside their training prompts. A round is named after the policy version it began at, no generator with older
weights takes part, and the versions that answered are reported. Where the rounds are is kept in Redis: a coordinator
that starts again goes on with the open one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from broker.pressure import BrokerFullError
from broker.records import EvalResult, EvalRound
from broker.sources import Source
from broker.store import Broker
from common import environment
from common.config import EvalConfig
from common.evaluation import standard_error
from common.log import Logger
from common.metrics import JsonlSink, MetricSink
from common.trackers import Target
from common.tracking import Trackers
from common.trajectory import EvalAnswers, Prompt

# How soon a stop is noticed while nothing happens.
_WAIT_MS = 500


class Evaluator:
    """Runs the evaluation rounds of one run.

    Args:
        broker: the run.
        options: the run's `eval` section, with `every` > 0.
        source: what `options.prompts` describes, in the data's own order.
        log: takes a line per round.
    """

    def __init__(self, broker: Broker, options: EvalConfig, source: Source, log: Logger) -> None:
        self._broker, self._every, self._samples, self._log = broker, options.every, options.samples, log
        # Read here: the tokenizer is shared with the feeder, whose thread runs beside ours.
        self._items = [source[position] for position in range(min(options.limit, len(source)))]
        self._folder = broker.config.run.folder
        self._sinks: list[MetricSink] = []

    def run(self, stopping: threading.Event) -> None:
        """Begin and end rounds until `stopping`, woken by events."""
        seen = "0"
        while not stopping.is_set():
            self.look()
            seen = self._broker.wait_event(seen, _WAIT_MS)

    def look(self) -> None:
        """End the open round if it is complete, or of weights that are gone; begin one if it is due."""
        state, version = self._broker.evaluation(), self._broker.version()
        if state.open is not None and state.open.complete:
            self._report(state.open)
        elif state.open is not None and version < state.open.version:  # the learner resumed from an older checkpoint
            self._give_up(state.open)
        last = state.last
        # Versions that were evaluated before the learner went back to older weights are evaluated again.
        if last is None or version < last or version // self._every > last // self._every:
            self._begin(version)

    def finish(self) -> None:
        """The run is over: end the open round with what there is."""
        opened = self._broker.evaluation().open
        if opened is not None and opened.complete:
            self._report(opened)
        elif opened is not None:
            self._give_up(opened)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _begin(self, version: int) -> None:
        prompts = [
            Prompt(f"eval-{version}-{index}", item.token_ids, item.text, item.columns, released_version=version)
            for index, item in enumerate(self._items)
        ]
        try:
            outcome = self._broker.begin_evaluation(version, prompts)
        except BrokerFullError:
            return
        if outcome == "skipped":
            self._log.warning("evaluation at version %d is skipped: the one before is not complete", version)

    def _give_up(self, opened: EvalRound) -> None:
        self._log.warning("%s, and no more will be: incomplete", opened)
        self._broker.end_evaluation(opened.version, None)

    def _report(self, opened: EvalRound) -> None:
        """Write the round down, then end it: whoever dies in between finds it complete again, and already written."""
        result = summarise(opened, self._broker.evaluation_answers(), self._samples)
        path = self._folder / "eval.jsonl"
        if _last_step(path) != opened.version:
            if not self._sinks:
                target = Target(self._broker.config, "eval", opened.version, environment.code())
                self._sinks = [JsonlSink(path), Trackers(target, self._log)]
            values = {name: value for name, value in asdict(result).items() if value is not None}
            for sink in self._sinks:
                sink.write(opened.version, values)
            self._log.info("%s", result)
        self._broker.end_evaluation(opened.version, result)


def _last_step(path: Path) -> int | None:
    """Step of the last record of a file of metrics."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, LookupError, ValueError):  # none yet, or cut off by a crash
        return None


def summarise(opened: EvalRound, prompts: Sequence[EvalAnswers], samples: int) -> EvalResult:
    """The result of a complete round, whose prompts were answered `samples` times each."""
    answers = [answer for each in prompts for answer in each.answers]
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    judged = any(answer.correct is not None for answer in answers)
    if judged:
        per_prompt = [sum(bool(answer.correct) for answer in each.answers) / samples for each in prompts]
    else:
        scored = [[answer.reward for answer in each.answers if answer.reward is not None] for each in prompts]
        per_prompt = [sum(values) / len(values) for values in scored if values]
    mean = sum(per_prompt) / max(len(per_prompt), 1)
    return EvalResult(
        version=opened.version,
        accuracy=mean if judged else None,
        standard_error=standard_error(per_prompt),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        response_length_mean=sum(answer.tokens for answer in answers) / max(len(answers), 1),
        truncated_share=sum(answer.truncated for answer in answers) / max(len(answers), 1),
        oldest_version=min((answer.oldest_version for answer in answers), default=opened.version),
        newest_version=max((answer.newest_version for answer in answers), default=opened.version),
        prompts=opened.prompts,
        samples=samples,
        not_scored=opened.prompts * samples - len(rewards),
        seconds=opened.seconds,
    )
