"""Published weights really land in vLLM: what it says about its tokens agrees with a plain forward of those weights."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from weight_helpers import PlainGenerator

from broker import Broker, Member
from common.config import Config, LoraConfig
from common.errors import HeadraceError
from common.log import Logger
from common.trajectory import NOTHING_YET, PartialGroup, PartialResponse, VersionRun
from common.weightcontrol import STOP
from common.weightwire import GlooGroup
from common.wirepartial import decode_partial, encode_partial
from generator.engine import Engine, Sampled
from generator.responses import Interrupted, usable
from generator.transfer import GlooInPlaceTransfer, GlooTransfer
from generator.updates import WeightReceiver
from learner import lora, transport
from learner.publisher import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([5, 9, 13], list(range(20, 60)), [200] * 17)]


@dataclass
class Fleet:
    """A learner's publisher and the engine's receiver, and the weights of every version published so far."""

    engine: Engine
    receiver: WeightReceiver
    publisher: WeightPublisher
    broker: Broker
    model: PreTrainedModel
    versions: dict[int, dict[str, torch.Tensor]]

    async def publish(self, version: int, scale: float = 0.02) -> None:
        """Perturb the weights at random and have them delivered."""
        rng = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=rng))
        self.versions[version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.publisher.publish(version, self.model.state_dict().items(), torch.float32)
        await asyncio.to_thread(self.publisher.wait, 60)

    def configured(self, **generator: int) -> Config:
        """The engine's configuration with other fields of its generator section."""
        config = self.engine.config
        return config.model_copy(update={"generator": config.generator.model_copy(update=generator)})

    def logprobs(self, version: int, prompt: np.ndarray, sample: Sampled) -> np.ndarray:
        """Log-probability of each response token under the weights of `version`, shape (tokens,)."""
        ids = torch.tensor(np.concatenate([prompt, sample.token_ids]), dtype=torch.long)
        with torch.no_grad():
            out = torch.func.functional_call(self.model, self.versions[version], (ids[None, :-1],), tie_weights=True)
            scores = out.logits[0].float().log_softmax(-1)
        return scores.gather(1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()


@pytest_asyncio.fixture(loop_scope="session")
async def fleet(engine: Engine, make_config: Callable[..., Config], tiny_model: Path) -> AsyncIterator[Fleet]:
    config = make_config(
        weights={"backend": "gloo", "timeout_s": 30, "bucket_mb": 1}, broker={"heartbeat_s": 0.2, "member_ttl_s": 10}
    )
    broker = Broker.connect(config)
    receiver = WeightReceiver(engine, broker, "g1", Logger("test", "g1"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    publisher = WeightPublisher(broker, config, Logger("test", "learner"))

    async def heartbeat() -> None:
        while not receiver.stopped.is_set():
            host, pid = socket.gethostname(), os.getpid()
            member = Member("g1", "generator", receiver.state, receiver.version, receiver.epoch, host, pid, {})
            await asyncio.to_thread(broker.heartbeat, member)
            await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(receiver.run()), asyncio.create_task(heartbeat())]
    fleet = Fleet(engine, receiver, publisher, broker, model, {})
    yield fleet
    await asyncio.to_thread(publisher.close)
    broker.announce(STOP)
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    broker.close()


async def first_version(fleet: Fleet, version: int) -> None:
    """Publish until the receiver, whose heartbeat may come a moment later, holds `version`."""
    await fleet.publish(version)
    await asyncio.wait_for(fleet.receiver.wait_for_version(version), 20)


async def test_sample_before_first_version_refused(engine: Engine) -> None:
    if engine.version is not None:
        pytest.skip("another test has brought weights already")
    with pytest.raises(HeadraceError, match="first weights"):
        await engine.sample("early", PROMPTS[0], 1)


async def test_five_updates_sampled_logprobs_equal_a_forward_of_those_weights(fleet: Fleet) -> None:
    await first_version(fleet, 0)
    worst = 0.0
    for version in range(6):
        if version:
            await fleet.publish(version)
        groups = await asyncio.gather(
            *(fleet.engine.sample(f"v{version}-{i}", ids, 4) for i, ids in enumerate(PROMPTS))
        )
        for prompt, group in zip(PROMPTS, groups, strict=True):
            assert len(group) == 4
            for sample in group:
                assert sample.versions == (VersionRun(version, 0),)
                error = np.abs(sample.logprobs - fleet.logprobs(version, prompt, sample)).max()
                worst = max(worst, float(error))
    assert worst < 1e-3, worst
    timings = fleet.publisher.timings
    assert timings is not None and timings.version == 5 and timings.members == 1
    print(f"worst difference {worst:.2e} nats; {timings}; {fleet.receiver.seconds}")


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_update_request_in_flight_goes_on_and_the_runs_start_at_the_right_token(
    fleet: Fleet, on_update: str
) -> None:
    await first_version(fleet, 10)
    weights = fleet.engine.config.weights.model_copy(update={"on_update": on_update})
    fleet.engine.config = fleet.engine.config.model_copy(update={"weights": weights})
    prompt = PROMPTS[1]
    request = asyncio.create_task(fleet.engine.sample(f"long-{on_update}", prompt, 4))
    for version in (11, 12):
        await fleet.publish(version, scale=0.05)
    samples = await request
    switched = [sample for sample in samples if len(sample.versions) > 1]
    assert switched, [sample.versions for sample in samples]
    for sample in switched:
        first, second = sample.versions[:2]
        before, after = (fleet.logprobs(run.version, prompt, sample) for run in (first, second))
        cut, end = second.start, sample.versions[2].start if len(sample.versions) > 2 else len(sample.token_ids)
        assert np.abs(sample.logprobs[:cut] - before[:cut]).max() < 1e-3
        assert np.abs(sample.logprobs[cut:end] - before[cut:end]).max() > 1e-2, "the weights differ enough to tell"
        if on_update == "recompute":
            assert np.abs(sample.logprobs[cut:end] - after[cut:end]).max() < 1e-3
    fresh = await fleet.engine.sample(f"again-{on_update}", prompt, 2)
    for sample in fresh:  # the same prompt: a cached prefix of older weights would show
        assert np.abs(sample.logprobs - fleet.logprobs(12, prompt, sample)).max() < 1e-3


async def test_update_other_member_dies_engine_goes_on_and_gets_it_in_the_next_group(fleet: Fleet) -> None:
    await first_version(fleet, 20)
    dying = await asyncio.to_thread(PlainGenerator, fleet.broker, "g2", "dies")
    request = asyncio.create_task(fleet.engine.sample("bystander", PROMPTS[0], 4))
    await fleet.publish(21)
    await asyncio.wait_for(fleet.receiver.wait_for_version(21), 20)
    assert len(await request) == 4
    for sample in await fleet.engine.sample("after", PROMPTS[2], 2):
        assert sample.versions == (VersionRun(21, 0),)
        assert np.abs(sample.logprobs - fleet.logprobs(21, PROMPTS[2], sample)).max() < 1e-3
    timings = fleet.publisher.timings
    assert timings is not None and (timings.members, timings.dropped) == (1, 1)
    dying.close()


async def test_update_arrives_damaged_old_version_stays_and_it_is_sent_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await first_version(fleet, 25)
    acks: list[tuple[object, int | None]] = []
    acknowledge, send = fleet.broker.acknowledge, transport.send_buckets

    def watched(message: dict[str, object]) -> str:
        acks.append((message["stage"], fleet.engine.version))
        return acknowledge(message)

    def damaged(group: GlooGroup, buckets: list[torch.Tensor]) -> None:
        monkeypatch.setattr(transport, "send_buckets", send)
        send(group, [bucket + 1 for bucket in buckets])

    monkeypatch.setattr(fleet.broker, "acknowledge", watched)
    monkeypatch.setattr(transport, "send_buckets", damaged)
    await fleet.publish(26)
    await asyncio.wait_for(fleet.receiver.wait_for_version(26), 20)
    assert ("corrupt", 25) in acks and ("loaded", 26) in acks
    for sample in await fleet.engine.sample("sound", PROMPTS[2], 2):
        assert sample.versions == (VersionRun(26, 0),)
        assert np.abs(sample.logprobs - fleet.logprobs(26, PROMPTS[2], sample)).max() < 1e-3


async def test_staging_off_request_in_flight_goes_on_with_the_weights_received_in_place(fleet: Fleet) -> None:
    await first_version(fleet, 27)
    fleet.receiver._transfer = GlooInPlaceTransfer(fleet.engine)
    request = asyncio.create_task(fleet.engine.sample("in place", PROMPTS[1], 4))
    await fleet.publish(28)
    assert len(await request) == 4
    for sample in await fleet.engine.sample("in place, after", PROMPTS[2], 2):
        assert sample.versions == (VersionRun(28, 0),)
        assert np.abs(sample.logprobs - fleet.logprobs(28, PROMPTS[2], sample)).max() < 1e-3


async def test_half_a_response_goes_on_elsewhere_and_every_token_keeps_its_own_weights(fleet: Fleet) -> None:
    """Interrupted, sent over the wire, continued under the next version: all of it agrees with plain forwards."""
    await first_version(fleet, 30)
    engine, prompt, tokens = fleet.engine, PROMPTS[1], fleet.engine.counters()["tokens"]
    engine.config = fleet.configured(handoff_tokens=8)
    left, long_enough = [NOTHING_YET] * 4, asyncio.Event()

    def report(index: int, response: PartialResponse) -> None:
        left[index] = response
        if all(len(each.token_ids) > 8 or each.finish_reason for each in left):
            long_enough.set()

    request = asyncio.create_task(engine.sample("half", prompt, 4, report=report))
    await asyncio.wait_for(long_enough.wait(), 60)
    await engine.interrupt()
    with pytest.raises(Interrupted):
        await request
    engine._interrupted = False  # as in another process
    await engine.resume(30)
    assert any(each.finish_reason is None for each in left)

    await fleet.publish(31, scale=0.05)
    partial = decode_partial(encode_partial(PartialGroup("7", tuple(left), 1.0)), "7", 4)
    begun = usable(partial, engine.config, 31)
    samples = await engine.sample("half", prompt, 4, begun=begun)
    worst, tokenizer = 0.0, engine.llm.get_tokenizer()
    for before, sample in zip(left, samples, strict=True):
        cut, total = len(before.token_ids), len(sample.token_ids)
        assert sample.token_ids[:cut].tolist() == before.token_ids.tolist()
        if before.finish_reason is None:
            assert sample.versions == (VersionRun(30, 0), VersionRun(31, cut))
        assert total <= engine.config.sampling.max_response_tokens
        assert (sample.finish_reason == "length") == (total == engine.config.sampling.max_response_tokens)
        assert sample.text == tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        old, new = (fleet.logprobs(version, prompt, sample) for version in (30, 31))
        error = np.abs(sample.logprobs - np.concatenate([old[:cut], new[cut:]])).max()
        worst = max(worst, float(error))
        assert np.abs(old - new).max() > 1e-2, "the weights differ enough to tell"
    assert worst < 1e-3, worst
    sampled = engine.counters()["tokens"] - tokens
    assert sampled == sum(len(sample.token_ids) for sample in samples), "no token was sampled twice"


async def test_progress_of_a_request_in_flight_names_the_versions_that_its_end_does(fleet: Fleet) -> None:
    await first_version(fleet, 32)
    fleet.engine.config = fleet.configured(handoff_tokens=8)
    reports: list[tuple[int, PartialResponse]] = []
    request = asyncio.create_task(
        fleet.engine.sample("progress", PROMPTS[0], 4, report=lambda *report: reports.append(report))
    )
    for version in (33, 34):
        await fleet.publish(version)
    samples = await request
    assert any(len(sample.versions) > 1 for sample in samples)
    for index, sample in enumerate(samples):
        mine = [report for which, report in reports if which == index]
        lengths = [0, *(len(report.token_ids) for report in mine)]
        assert max(later - earlier for earlier, later in itertools.pairwise(lengths)) <= 9
        for report in mine:
            size = len(report.token_ids)
            assert report.token_ids.tolist() == sample.token_ids[:size].tolist()
            assert report.logprobs.tolist() == sample.logprobs[:size].tolist()
            assert report.versions == tuple(run for run in sample.versions if run.start < size)


@pytest.mark.parametrize(("version", "transfer"), [(36, GlooTransfer), (38, GlooInPlaceTransfer)])
async def test_adapter_sent_alone_is_added_to_the_base_that_the_engine_started_with(
    fleet: Fleet, tiny_model: Path, version: int, transfer: type[GlooTransfer | GlooInPlaceTransfer]
) -> None:
    await first_version(fleet, version)  # other whole weights, of which nothing must be left
    fleet.receiver._transfer = transfer(fleet.engine)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    settings = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
    adapter = lora.add(base, settings)
    rng = torch.Generator().manual_seed(version)
    for _, layer in lora.layers(base):
        for factor in lora.factors(layer):
            factor.data.copy_(0.1 * torch.randn(factor.shape, generator=rng))
    request = asyncio.create_task(fleet.engine.sample(f"under way {version}", PROMPTS[1], 4))
    factors = [(name, parameter.detach()) for name, (parameter,) in lora.wire(base)]
    fleet.versions[version + 1] = {name: lora.sum_of(each, adapter.scale) for name, each in lora.whole(base)}
    fleet.publisher.publish(version + 1, factors, torch.float32, adapter)
    await asyncio.to_thread(fleet.publisher.wait, 60)
    assert len(await request) == 4
    assert fleet.publisher.timings is not None
    whole = sum(tensor.nbytes for tensor in fleet.versions[version + 1].values())
    assert fleet.publisher.timings.nbytes < whole / 20
    for sample in await fleet.engine.sample(f"adapted {version}", PROMPTS[2], 2):
        assert sample.versions == (VersionRun(version + 1, 0),)
        assert np.abs(sample.logprobs - fleet.logprobs(version + 1, PROMPTS[2], sample)).max() < 1e-3
        assert np.abs(sample.logprobs - fleet.logprobs(version, PROMPTS[2], sample)).max() > 1e-2


async def test_prompt_too_long_is_a_data_failure_and_the_engine_goes_on(fleet: Fleet) -> None:
    from generator.rewards import DataFailure

    await first_version(fleet, 40)
    with pytest.raises(DataFailure, match="max_prompt_tokens"):
        await fleet.engine.sample("long", np.zeros(65, dtype=np.int32), 1)
    assert len(await fleet.engine.sample("fine", PROMPTS[0], 3)) == 3
