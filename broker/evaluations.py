"""The evaluation side: the coordinator begins rounds, generators answer their prompts, the coordinator ends them.

Promise: one round at a time, and of each of its prompts one set of answers counts, whoever dies. What is evaluated is
no part of the ledger, of the release budget or of anything else that training counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from broker.keys import GENERATORS
from broker.link import Link, _log
from broker.records import EvalLease, EvalResult, EvalRound, EvalState
from common import wire
from common.errors import WireError
from common.trajectory import EvalAnswers, Prompt


class Evaluations(Link):
    """Methods of `Broker` around the `eval` stream."""

    def begin_evaluation(self, version: int, prompts: Sequence[Prompt]) -> Literal["begun", "over", "skipped"]:
        """Begin a round of `prompts`, all of them or none.

        Returns:
            "begun": by this call or by an earlier copy. "over": there was a round of this version already. "skipped":
            another round is open; there will be none of this version.

        Raises:
            BrokerFullError: the server is at its memory limit; nothing was written.
        """
        args = [wire.encode_prompt(prompt) for prompt in prompts]
        outcome = int(self._run("eval_begin", [self.keys.eval, self.keys.rounds], [version, *args]))
        return "begun" if outcome == 1 else "over" if outcome == 0 else "skipped"

    def lease_evaluation(self, consumer: str, version: int) -> EvalLease | None:
        """A prompt of the open round for generator `consumer`, which works on none and samples with `version`.

        Returns:
            None: there is no round, none of its prompts waits, or the generator is older than the round. A prompt that
            cannot be decoded is left without answers.
        """
        k = self.keys
        reply = self._run("eval_lease", [k.eval, k.rounds, k.answers], [GENERATORS, consumer, version])
        if not reply:
            return None
        entry_id, opened, index, payload = reply[0].decode(), int(reply[1]), int(reply[2]), reply[3]
        try:
            return EvalLease(entry_id, opened, index, wire.decode_prompt(payload))
        except WireError as error:
            _log.warning("evaluation prompt %d has no answers: %s", index, error)
            self.answer_evaluation(entry_id, EvalAnswers(opened, index, ()))
            return None

    def renew_evaluation(self, consumer: str, entry_id: str) -> None:
        """Reset the idle time of `consumer`'s evaluation lease, if it still holds it."""
        self._run("renew", [self.keys.eval], [GENERATORS, consumer, entry_id])

    def answer_evaluation(self, entry_id: str, answers: EvalAnswers) -> bool:
        """Hand in the answers to a leased evaluation prompt.

        Returns:
            False: somebody else has answered it, or the round is over. These answers are discarded.
        """
        k = self.keys
        packed = wire.encode_answers(answers)
        args: list[str | bytes | int] = [GENERATORS, entry_id, answers.version, answers.index, packed]
        return bool(self._run("eval_answer", [k.eval, k.rounds, k.answers, k.events], args))

    def evaluation(self) -> EvalState:
        """Where evaluation is, of one instant."""
        seconds, microseconds, flat, answered = self._run("look", [self.keys.rounds, self.keys.answers], [])
        state = dict(zip(flat[::2], flat[1::2], strict=True))
        opened = None
        if b"round" in state:
            elapsed = seconds + microseconds / 1e6 - int(state[b"started"]) / 1000
            opened = EvalRound(int(state[b"round"]), int(state[b"prompts"]), answered, max(0.0, elapsed))
        last = int(state[b"last"]) if b"last" in state else None
        return EvalState(opened, last, _result(state[b"result"]) if b"result" in state else None)

    def evaluation_answers(self) -> list[EvalAnswers]:
        """What the open round's prompts were answered so far; what cannot be decoded is left out."""
        answers = []
        for index, packed in self._call(lambda: self._client.hgetall(self.keys.answers)).items():
            try:
                answers.append(wire.decode_answers(packed))
            except WireError as error:
                _log.warning("evaluation prompt %s: %s", index.decode(errors="replace"), error)
        return answers

    def end_evaluation(self, version: int, result: EvalResult | None) -> None:
        """End the round of this version, if it is the open one, and keep its result (None: it is incomplete)."""
        k = self.keys
        packed = b"" if result is None else wire.pack("evaluation", asdict(result))
        self._run("eval_end", [k.eval, k.rounds, k.answers], [GENERATORS, version, packed])


def _result(packed: bytes) -> EvalResult | None:
    try:
        body = wire.unpack(packed, "evaluation")
        return EvalResult(**{name: value for name, value in body.items() if name not in ("v", "t")})
    except (WireError, TypeError) as error:
        _log.warning("the last evaluation's result is skipped: %s", error)
        return None
