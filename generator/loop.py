"""A generator: leases prompts, samples a group for each, scores it, submits it; weights change underneath.

Read `Generator.run` and `Generator._serve` and you have read the generator. What it promises:

- it takes no prompt before it holds a published version, nor samples one while its weights are older than the learner
  accepts at the prompt's release (architecture, invariants 3 and 6);
- every lease ends in exactly one of submitted, filtered, failed (data) or given back (infrastructure);
- on SIGTERM, when `headrace drain` asks for it, or when the run is finished, it takes nothing new, hands over what it
  has not finished (`generator.handover`), and exits 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine

from broker import Broker, Lease, Member, until_taken
from common.config import Config
from common.errors import HeadraceError
from common.log import Logger
from common.trajectory import Group, Prompt, Response
from generator.engine import Engine, EngineError
from generator.exposed import Exposed
from generator.handover import Handover, Work
from generator.live import LiveEvaluation
from generator.responses import Interrupted, Sampled, check_finite
from generator.rewards import DataFailure, RewardPool, Score, shape, uninformative
from generator.updates import WeightReceiver

LEASE_BLOCK_MS = 1000
# Each of the two steps of leaving: the engine stops, and what is unfinished is handed over. `headrace up` waits 20 s
# for the exit, Kubernetes 30 s.
LEAVE_STEP_S = 7.0


class Generator:
    """One vLLM engine between the prompt stream and the group stream."""

    def __init__(
        self, config: Config, generator_id: str, broker: Broker, log: Logger, engine: Engine | None = None
    ) -> None:
        self.config, self.id, self.broker, self.log = config, generator_id, broker, log
        self.engine = engine or Engine(config, generator_id)
        self.rewards = RewardPool(config)
        self.receiver = WeightReceiver(self.engine, broker, generator_id, log)
        self.evaluation: LiveEvaluation | None = None
        if config.eval is not None and config.eval.every:
            self.evaluation = LiveEvaluation(config, generator_id, broker, self.engine, self.rewards, log)
        self.draining = asyncio.Event()
        self.handover = Handover(config, generator_id, broker, log)
        self.exposed = Exposed(config, self._member, lambda: self.receiver.seconds)
        self._in_flight: dict[str, Work] = {}
        self._started = time.monotonic()
        self._blocked_s = 0.0
        self._counts = dict.fromkeys(("groups", "filtered", "duplicates"), 0)

    async def run(self) -> None:
        """Serve until drained or until the run is finished.

        Raises:
            HeadraceError: the engine died, or the broker is gone for longer than its deadline.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.exposed.open())
            heartbeat = asyncio.create_task(self._heartbeat())
            stack.push_async_callback(self._leave, heartbeat)
            self.rewards.start()
            stack.callback(self.rewards.close)
            stack.push_async_callback(self.engine.close)
            if await self._until_drained(self.engine.start(), self._watch(heartbeat)):
                self.log.info("engine ready after %.1f s", time.monotonic() - self._started)
                try:
                    await self._until_drained(self._serve(), self.receiver.run(), self._watch(heartbeat))
                finally:
                    await self._hand_over()
        self.log.info("gone: %s", " ".join(f"{name}={count}" for name, count in self._totals().items()))

    def _drain(self) -> None:
        """From now on nothing new is taken."""
        self.receiver.standing.drain()
        self.draining.set()

    async def _until_drained(self, job: Coroutine[None, None, None], *beside: Coroutine[None, None, None]) -> bool:
        """Run all until the first of them ends, whose error is ours, or it is time to leave. Returns whether `job` was
        done before that."""
        tasks = [asyncio.create_task(each) for each in (job, *beside)]
        drained = asyncio.create_task(self.draining.wait())
        stopped = asyncio.create_task(self.receiver.stopped.wait())
        try:
            done, _ = await asyncio.wait([*tasks, drained, stopped], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] not in done:
                self._drain()
                for other in tasks[1:]:
                    other.cancel()
                await self._interrupt()
        finally:
            for each in (*tasks, drained, stopped):
                each.cancel()
            await asyncio.gather(*tasks, drained, stopped, return_exceptions=True)
        for task in done:
            if not task.cancelled() and (error := task.exception()):
                raise _alone(error)
        return tasks[0] in done

    async def _interrupt(self) -> None:
        """Have the engine say what there is of every response; where it cannot, what it said before has to do."""
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(self.engine.interrupt(), LEAVE_STEP_S)

    async def _serve(self) -> None:
        """Keep `prompts_in_flight` prompts in flight, one of them at most an evaluation's."""
        await self.receiver.wait_for_version(0)
        slots = asyncio.Semaphore(self.config.generator.prompts_in_flight)
        async with asyncio.TaskGroup() as group:
            if self.evaluation is not None:
                group.create_task(self._evaluate(self.evaluation, slots))
            while True:
                await slots.acquire()
                await self.receiver.wait_until_serving()
                if self.draining.is_set():
                    return
                work = await self._lease()
                if work is None:
                    slots.release()
                    continue
                group.create_task(self._one(work, slots))

    async def _evaluate(self, evaluation: LiveEvaluation, slots: asyncio.Semaphore) -> None:
        with contextlib.suppress(Interrupted):  # another generator answers that prompt
            await evaluation.run(slots)

    async def _lease(self) -> Work | None:
        """The next prompt, if there is one; cancelled, it still takes what it was given into `_in_flight`."""
        started = time.monotonic()
        call = asyncio.ensure_future(asyncio.to_thread(self.broker.lease, self.id, 1, LEASE_BLOCK_MS))
        try:
            leases = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._take(await call)
            raise
        finally:
            self._blocked_s += time.monotonic() - started
        return self._take(leases)

    def _take(self, leases: list[Lease]) -> Work | None:
        # A server that lost its last second may hand out again what we are working on.
        if not leases or leases[0].entry_id in self._in_flight:
            return None
        work = self._in_flight[leases[0].entry_id] = Work(leases[0])
        return work

    async def _one(self, work: Work, slots: asyncio.Semaphore) -> None:
        """One prompt, from lease to its end."""
        lease = work.lease
        try:
            await self._sample_and_settle(work)
            self._in_flight.pop(lease.entry_id)
        except Interrupted:
            pass  # handed over at the end
        except DataFailure as failure:
            self.exposed.failed[failure.kind] += 1
            self.log.warning("prompt %s failed: %s", lease.prompt.group_id, failure)
            await asyncio.to_thread(self.broker.fail, self.id, lease.entry_id, lease.prompt, str(failure))
            self._in_flight.pop(lease.entry_id)
        finally:
            slots.release()

    async def _sample_and_settle(self, work: Work) -> None:
        lease, prompt = work.lease, work.lease.prompt
        await self._wait_until_current(prompt)
        samples = await self.engine.sample(
            lease.entry_id,
            prompt.token_ids,
            self.config.sampling.group_size,
            begun=self.handover.begin(work, self.receiver.version),
            report=self.handover.reporter(work),
        )
        sampled_at = time.time()
        await self._mark("sampled", prompt.group_id)
        check_finite(samples, prompt.group_id)
        scores = await self.rewards.score(prompt, [sample.text for sample in samples])
        await self._mark("scored", prompt.group_id)
        kind = uninformative(scores) if self.config.sampling.dynamic_sampling else None
        if kind is not None:
            self._counts["filtered"] += 1
            await asyncio.to_thread(self.broker.filtered, self.id, lease.entry_id, kind)
            return
        group = self._group(lease, samples, scores, sampled_at)
        if await until_taken(lambda: self.broker.submit(self.id, lease, group)):
            self._counts["groups"] += 1
        else:
            self._counts["duplicates"] += 1
            self.handover.counts["sampled_twice"] += sum(len(sample.token_ids) for sample in samples)
            self.log.warning("prompt %s: lease was taken over, group discarded", prompt.group_id)

    async def _mark(self, event: str, group_id: str) -> None:
        if self.broker.traces(group_id):
            await asyncio.to_thread(self.broker.mark, event, [group_id], self.id, self.receiver.version)

    async def _wait_until_current(self, prompt: Prompt) -> None:
        """Return when the weights are recent enough for the prompt: for the learner that released it, or, where that
        one died and its successor resumed from an older version, for the successor."""
        bound = self.config.staleness.sampling_lag
        while self.receiver.version < prompt.released_version - bound:
            if self.receiver.version >= await asyncio.to_thread(self.broker.version) - bound:
                return
            self.exposed.health.beat()  # it is the learner that is late
            await self.receiver.wait_for_update(self.config.broker.heartbeat_s)

    def _group(self, lease: Lease, samples: list[Sampled], scores: list[Score], sampled_at: float) -> Group:
        rewards = shape(scores, [len(sample.token_ids) for sample in samples], self.config)
        return Group(
            group_id=lease.prompt.group_id,
            prompt_ids=lease.prompt.token_ids,
            responses=tuple(
                Response(
                    token_ids=sample.token_ids,
                    logprobs=sample.logprobs,
                    versions=sample.versions,
                    finish_reason=sample.finish_reason,
                    raw_reward=score.reward,
                    reward=reward,
                    correct=score.correct,
                )
                for sample, score, reward in zip(samples, scores, rewards, strict=True)
            ),
            generator=self.id,
            temperature=self.config.sampling.temperature,
            sampled_at=sampled_at,
            released_version=lease.prompt.released_version,
        )

    async def _heartbeat(self) -> None:
        """Tell the registry that we live, and keep our leases."""
        while True:
            if await asyncio.to_thread(self.broker.heartbeat, self._member()) and not self.draining.is_set():
                self.log.info("asked to leave")
                self._drain()
            if self.config.metrics.port is not None and self.receiver.state != "joining":
                self.exposed.beat(await asyncio.to_thread(self.broker.version))
            if self._in_flight:
                await asyncio.to_thread(self.broker.renew, self.id, list(self._in_flight))
            if self.evaluation is not None and self.evaluation.held is not None:
                await asyncio.to_thread(self.broker.renew_evaluation, self.id, self.evaluation.held)
            await asyncio.sleep(self.config.broker.heartbeat_s)

    async def _watch(self, heartbeat: asyncio.Task[None]) -> None:
        """A generator whose heartbeat failed is invisible: better to end with its error."""
        await asyncio.shield(heartbeat)  # which goes on until we have left

    def _totals(self) -> dict[str, int]:
        return {**self._counts, "failures": self.exposed.failed.total(), **self.handover.counts}

    def _member(self) -> Member:
        wall = time.monotonic() - self._started
        counters = {**self._totals(), **self.engine.counters(), "wall_s": wall}
        counters |= {"blocked_s": self._blocked_s, "broker_full_s": self.broker.pressure.seconds}
        counters |= {"in_flight": len(self._in_flight), "updates": self.receiver.updates}
        if self.evaluation is not None:
            counters["evaluated"] = self.evaluation.answered
        return Member(
            id=self.id,
            role="generator",
            state=self.receiver.state,
            version=self.receiver.version,
            epoch=self.receiver.epoch,
            host=socket.gethostname(),
            pid=os.getpid(),
            counters={name: float(value) for name, value in counters.items()},
        )

    async def _hand_over(self) -> None:
        """Give back what is unfinished, with what was sampled of it; what cannot be within the time is taken back."""
        self._drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_STEP_S):
                await asyncio.to_thread(self.broker.heartbeat, self._member())  # leaves the weight group
                for work in self._in_flight.values():
                    await self.handover.give_back(work)
        if self._in_flight:
            self.log.info("gave back %d unfinished prompts", len(self._in_flight))

    async def _leave(self, heartbeat: asyncio.Task[None]) -> None:
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)
        with contextlib.suppress(HeadraceError):
            await asyncio.to_thread(self.broker.leave, self.id)


def _alone(error: BaseException) -> BaseException:
    """What a task group raises holds the error of a task: that is what people should see."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
