"""vLLM's AsyncLLM as a generator needs it: sample a group, be paused and given new weights, die audibly.

What it promises:

- Every sampled token comes with its behaviour log-probability (after temperature) and the policy version that the
  engine stamped on it; nothing is truncated, and nothing is sampled before there is a version.
- Nobody waits for a dead engine: vLLM's calls never return once its core process is gone, so every call here races
  against the engine's death, and control calls against a deadline too.
- A response that another generator began goes on from its tokens; what there is of one is told as it grows.
- A prompt that cannot be sampled is a `DataFailure`; an engine that cannot go on is an `EngineError`.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from common.config import Config
from common.errors import HeadraceError
from common.trajectory import NOTHING_YET, Int32Array, PartialResponse
from common.weightwire import resolve_backend
from generator import lifeline
from generator.responses import EngineError as EngineError
from generator.responses import Growing, Interrupted
from generator.responses import Sampled as Sampled
from generator.responses import check_finite as check_finite
from generator.rewards import DataFailure

T = TypeVar("T")
# Told the index of a response and what there is of it, whenever it has grown by `generator.handoff_tokens`.
Report = Callable[[int, PartialResponse], None]
_WATCH_S = 0.2  # vLLM offers no event for its core's death, only a flag


class Engine:
    """One vLLM engine.

    Args:
        config: the run's configuration.
        generator_id: names this replica; its sampling seed follows from it and `run.seed`.
        initial_version: version of the weights in `model.path`. None: they are not a version of this run, so nothing
            may be sampled before the first update.
    """

    def __init__(self, config: Config, generator_id: str, initial_version: int | None = None) -> None:
        self.config, self.generator_id = config, generator_id
        self.version = initial_version
        self.backend = resolve_backend(config.weights.backend)
        self._llm: Any = None
        self._dead: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._counts = dict.fromkeys(("tokens", "requests", "busy_s", "paused_s"), 0.0)
        self._running, self._paused, self._marked = 0, False, time.monotonic()
        self._open: set[str] = set()  # requests of vLLM's
        self._interrupted = False

    # --- life

    async def start(self) -> None:
        """Load the model; some 10-20 s on a CPU. Cancelled, it ends vLLM's processes and returns soon.

        Raises:
            EngineError: vLLM did not start.
        """
        before = set(multiprocessing.active_children())
        building = asyncio.create_task(asyncio.to_thread(self._build))
        try:
            self._llm = await asyncio.shield(building)
        except asyncio.CancelledError:
            while not building.done():  # its thread cannot be cancelled, but waits for processes that can
                for child in set(multiprocessing.active_children()) - before:
                    child.terminate()
                await asyncio.wait([building], timeout=_WATCH_S)
            if building.exception() is None:
                self._llm = building.result()
                await self.close()
            raise
        except Exception as error:  # vLLM raises many kinds; its processes have logged the cause
            raise EngineError(f"vLLM did not start: {error}") from error
        self._dead = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())
        if self.version is not None:
            await self.control(self._llm.update_weight_version(str(self.version)), "update_weight_version")

    def _build(self) -> Any:
        _prepare_environment(self.config)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.config, self.generator_id)))

    async def _watch(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_S)
        assert self._dead is not None
        if not self._dead.done():
            self._dead.set_result(None)

    async def close(self) -> None:
        """Stop the engine and its processes."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
            # At interpreter exit vLLM's finaliser would shut it down again, without its globals, and complain.
            type(llm).__del__ = lambda self: None

    async def _race(self, call: Coroutine[Any, Any, T], what: str, deadline_s: float | None = None) -> T:
        """The call's result; EngineError if the engine dies first or the deadline passes."""
        if self._dead is None:
            call.close()
            raise EngineError(f"{what}: the engine is not running")
        task: asyncio.Future[Any] = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task, self._dead], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return cast(T, task.result())
        finally:
            task.cancel()
        if self._dead.done():
            raise EngineError(f"{what}: vLLM's engine process died; its last lines are in this process's log")
        raise EngineError(f"{what}: vLLM did not answer within {deadline_s:.0f} s (weights.timeout_s)")

    # --- sampling

    async def sample(
        self,
        request_id: str,
        prompt_ids: Int32Array,
        n: int,
        *,
        temperature: float | None = None,
        top_p: float = 1.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        begun: Sequence[PartialResponse] = (),
        report: Report | None = None,
    ) -> list[Sampled]:
        """Sample `n` responses to one prompt; what is not given is as in training.

        With `seed` (31 bits) the draws depend on it alone, not on what else the engine is doing.

        Args:
            begun: what there is of each response; those that are finished stay as they are, the others go on. Empty:
                nothing.
            report: told of each response as it grows, when it is finished, and when `interrupt` ends it.

        Raises:
            DataFailure: the prompt is too long, or vLLM refuses it.
            EngineError: there is no version yet, or the engine died.
            Interrupted: `interrupt` was called.
        """
        if self.version is None:
            raise EngineError("sampling before the first weights have arrived")
        sampling = self.config.sampling
        if not 0 < len(prompt_ids) <= sampling.max_prompt_tokens:
            raise DataFailure(
                f"prompt of {len(prompt_ids)} tokens; expected 1 to {sampling.max_prompt_tokens} "
                "(sampling.max_prompt_tokens)",
                "prompt",
            )
        temperature = sampling.temperature if temperature is None else temperature
        limit = max_tokens or sampling.max_response_tokens
        interval = limit if report is None else self.config.generator.handoff_tokens or limit

        async def one(index: int, before: PartialResponse) -> Sampled | None:
            if before.finish_reason is not None:
                return self._finished(before, None)
            left = limit - len(before.token_ids)
            own_seed = None if seed is None else seed + index
            params = _sampling_params(temperature, top_p, left, own_seed, interval)
            tell = partial(report or _nobody, index)
            return await self._grow(Growing(before, f"{request_id}-{index}"), prompt_ids, params, tell)

        tasks = [asyncio.ensure_future(one(i, each)) for i, each in enumerate(begun or [NOTHING_YET] * n)]
        self._mark(running=+1)
        try:
            samples = await self._race(_all(tasks), f"request {request_id}")
        finally:
            self._mark(running=-1)
            for task in tasks:
                task.cancel()
        finished = [sample for sample in samples if sample is not None]
        if len(finished) < len(samples):
            raise Interrupted
        self._counts["requests"] += 1
        return finished

    async def _grow(
        self, growing: Growing, prompt_ids: Int32Array, params: Any, tell: Callable[[PartialResponse], None]
    ) -> Sampled | None:
        """Sample one response to its end, from what there is of it; None where it was interrupted."""
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id, reason = growing.request_id, None
        prompt: dict[str, Any] = {"prompt_token_ids": [*prompt_ids.tolist(), *growing.before.token_ids.tolist()]}
        if self.config.weights.on_update == "keep":
            # The cache survives updates, so a prefix computed by other weights must not be found.
            prompt["cache_salt"] = str(self.version)
        if self._interrupted:
            return None
        self._open.add(request_id)
        try:
            async for latest in self._llm.generate(prompt, params, request_id):
                completion = latest.outputs[0]
                growing.add(completion)
                self._counts["tokens"] += len(completion.token_ids)
                reason = completion.finish_reason
                if reason not in (None, "stop", "length", "abort"):
                    raise EngineError(f"request {request_id}: finished with {reason!r}; expected stop or length")
                spans = completion.weight_versions if reason else self._spans(request_id)
                so_far = growing.so_far(spans, None if reason == "abort" else reason)
                tell(so_far)
        except EngineDeadError:
            raise EngineError(f"request {request_id}: vLLM's engine process died") from None
        except HeadraceError:
            raise
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise EngineError(f"request {request_id}: vLLM's engine process died") from error
            raise DataFailure(f"vLLM refused the prompt: {error}", "prompt") from error
        finally:
            self._open.discard(request_id)
        if reason == "abort" and self._interrupted:
            return None
        if reason not in ("stop", "length") or not growing.tokens:
            raise EngineError(f"request {request_id}: vLLM ended it without a result")
        return self._finished(so_far, None if len(growing.before.token_ids) else growing.text)

    def _finished(self, response: PartialResponse, text: str | None) -> Sampled:
        """A response with its end; `text` None: it was continued, so the text is that of all its tokens."""
        assert response.finish_reason is not None
        if text is None:
            text = str(self._llm.get_tokenizer().decode(response.token_ids.tolist(), skip_special_tokens=True))
        return Sampled(response.token_ids, response.logprobs, response.versions, response.finish_reason, text)

    def _spans(self, request_id: str) -> Any:
        """The version spans of a request that runs. vLLM tells them at its end only, but keeps them all along."""
        processor = self._llm.output_processor
        states = [processor.request_states[each] for each in processor.external_req_ids.get(request_id, ())]
        if len(states) != 1:
            raise EngineError(f"request {request_id}: vLLM runs {len(states)} requests of that name; expected 1")
        return states[0]._weight_version_spans()

    async def interrupt(self) -> None:
        """End all sampling for good: every response is reported with all its tokens, `sample` raises Interrupted.

        Raises:
            EngineError: the engine died or did not answer in time.
        """
        self._interrupted = True
        if self._llm is None:
            return
        # Paused first: a token that is under way at an abort is lost.
        await self.control(self._llm.pause_generation(mode="keep", clear_cache=False), "pause_generation")
        await self.control(self._llm.abort(list(self._open)), "abort")

    # --- weights

    async def control(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """A control call of vLLM within `weights.timeout_s`.

        Raises:
            EngineError: the engine died, did not answer in time, or refused.
        """
        try:
            return await self._race(call, what, self.config.weights.timeout_s)
        except HeadraceError:
            raise
        except Exception as error:
            raise EngineError(f"{what}: {error}") from error

    @property
    def llm(self) -> Any:
        """vLLM's own object, for control calls."""
        return self._llm

    async def pause(self) -> None:
        """Stop between two tokens. Requests are kept; `on_update: recompute` drops what the old weights cached."""
        clear = self.config.weights.on_update == "recompute"
        await self.control(self._llm.pause_generation(mode="keep", clear_cache=clear), "pause_generation")
        self._mark(paused=True)

    async def resume(self, version: int) -> None:
        """Go on, with weights of `version`."""
        self.version = version
        await self.control(self._llm.resume_generation(), "resume_generation")
        self._mark(paused=False)

    # --- counters

    def _mark(self, running: int = 0, paused: bool | None = None) -> None:
        now = time.monotonic()
        if self._paused:
            self._counts["paused_s"] += now - self._marked
        elif self._running:
            self._counts["busy_s"] += now - self._marked
        self._marked, self._running = now, self._running + running
        if paused is not None:
            self._paused = paused

    def counters(self) -> dict[str, float]:
        """Since the start: tokens and requests sampled, seconds busy (a request runs, not paused), seconds paused."""
        self._mark()
        return dict(self._counts)


def engine_seed(run_seed: int, generator_id: str) -> int:
    """Sampling seed of a replica, 31 bits: equal seeds on two replicas would sample duplicate text."""
    digest = hashlib.sha256(f"{run_seed}:{generator_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def engine_arguments(config: Config, generator_id: str) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs for this run."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    generator, sampling = config.generator, config.sampling
    longest = max(sampling.max_response_tokens, (config.eval and config.eval.max_response_tokens) or 0)
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": generator.dtype,
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_num_seqs": generator.max_num_seqs,
        "max_model_len": sampling.max_prompt_tokens + longest,
        "gpu_memory_utilization": generator.gpu_memory_utilization,
        # On CPUs compiling costs the first request half a minute and gains little.
        "enforce_eager": generator.enforce_eager or current_platform.is_cpu(),
        "enable_prefix_caching": True,
        "seed": engine_seed(config.run.seed, generator_id),
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=resolve_backend(config.weights.backend)),
        "disable_log_stats": config.metrics.port is None,  # its metrics stand beside ours
    }
    if resolve_backend(config.weights.backend) == "gloo":
        arguments["worker_extension_cls"] = "generator.gloo_plugin.WorkerChecks"
    if generator.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = generator.kv_cache_mb << 20
    if generator.block_size is not None:
        arguments["block_size"] = generator.block_size
    return arguments


def _prepare_environment(config: Config) -> None:
    """What vLLM and its child processes read from the environment; an operator's own setting wins."""
    lifeline.tie()
    os.environ["OMP_NUM_THREADS"] = str(config.generator.threads)
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_NO_USAGE_STATS", "1"),
        # By itself every CPU engine pins itself to the first cores, all of them to the same.
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # This process has threads (broker client, rewards): a fork could copy a held lock.
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        # torch takes huge pages for tensors: much of what receiving weights costs is the first touch of new memory.
        ("THP_MEM_ALLOC_ENABLE", "1"),
    ):
        os.environ.setdefault(name, value)


async def _all(tasks: Sequence[asyncio.Future[T]]) -> list[T]:
    return list(await asyncio.gather(*tasks))


def _nobody(_index: int, _so_far: PartialResponse) -> None:
    """A report that is not asked for."""


def _sampling_params(temperature: float, top_p: float, max_tokens: int, seed: int | None, stream_interval: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval,
    )
