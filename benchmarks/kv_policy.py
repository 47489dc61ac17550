"""What `weights.on_update` costs and what it is worth: `keep` against `recompute`, one engine, in one call.

    python -m benchmarks.kv_policy [--model models/tiny] [--tokens N] [--json]

The same prompts are sampled without updates, and with updates a few steps apart under either policy, in turns. The
stall is what an update adds to the time until all tokens are there: the pause, and under `recompute` the prefill of
everything that was in flight. Agreement: the log-probabilities of tokens after a response's first seam against a
forward pass of the weights they are stamped with. Every update moves every weight by `--step` at random, as AdamW does
at that learning rate. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from broker import Broker, Member, Server
from common.config import BrokerConfig, Config
from common.log import Logger
from common.weightcontrol import STOP
from generator.engine import Engine, Sampled
from generator.updates import WeightReceiver
from learner.publisher import WeightPublisher

PROMPTS, GROUP, UPDATES = 4, 4, 3


def configure(model: Path, tokens: int, server: Server) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "kv-policy"},
            "model": {"path": str(model)},
            "prompts": {"type": "reasoning_gym", "task": "chain_sum"},
            "reward": {"type": "reasoning_gym"},
            "sampling": {"group_size": GROUP, "max_prompt_tokens": 64, "max_response_tokens": tokens},
            "generator": {"dtype": "float32", "kv_cache_mb": 256, "max_num_seqs": PROMPTS * GROUP, "block_size": 32},
            "learner": {"micro_batch_tokens": 4096},
            "weights": {"backend": "gloo", "timeout_s": 60},
            "broker": {"url": server.url, "password_file": server.password_file, "heartbeat_s": 0.5},
        }
    )


class Bench:
    def __init__(self, config: Config, step: float) -> None:
        self.config, self.step = config, step
        self.broker = Broker.connect(config)
        self.engine = Engine(config, "g1")
        self.receiver = WeightReceiver(self.engine, self.broker, "g1", Logger("bench", "g1"))
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        rng = np.random.default_rng(1)
        self.prompts = [rng.integers(5, 500, 40).astype(np.int32) for _ in range(PROMPTS)]

    async def run(self) -> dict[str, Any]:
        await self.engine.start()
        self.publisher = WeightPublisher(self.broker, self.config, Logger("bench", "learner"))
        tasks = [asyncio.create_task(self.receiver.run()), asyncio.create_task(self._heartbeat())]
        await self._publish()
        await self.receiver.wait_for_version(0)
        await self._sample("warm-up", 0)
        found: dict[str, dict[str, list[Any]]] = {
            policy: {"stall_s": [], "pause_s": [], "gap": []} for policy in ("keep", "recompute")
        }
        for turn in range(3):
            plain_s, _, _ = await self._sample(f"plain-{turn}", 0)
            for policy, figures in found.items():
                weights = self.config.weights.model_copy(update={"on_update": policy})
                self.engine.config = self.config.model_copy(update={"weights": weights})
                seconds, pauses, groups = await self._sample(f"{policy}-{turn}", UPDATES, plain_s)
                figures["stall_s"].append((seconds - plain_s) / UPDATES)
                figures["pause_s"] += pauses
                figures["gap"].append(self._gap(groups))
        self.broker.announce(STOP)
        await asyncio.gather(*tasks)
        await asyncio.to_thread(self.publisher.close)
        await self.engine.close()
        out: dict[str, Any] = {"tokens_in_flight": PROMPTS * GROUP * self.config.sampling.max_response_tokens}
        out["plain_s"] = plain_s
        for policy, figures in found.items():
            gaps = np.concatenate(figures["gap"])
            out[policy] = {
                "stall_s": statistics.median(figures["stall_s"]), "pause_s": statistics.median(figures["pause_s"]),
                "tokens_after_seam": int(gaps.size), "gap_mean": float(gaps.mean()),
                "gap_p99": float(np.quantile(gaps, 0.99)), "gap_max": float(gaps.max()),
            }  # fmt: skip
        return out

    async def _sample(
        self, name: str, updates: int, expected_s: float = 0.0
    ) -> tuple[float, list[float], list[list[Sampled]]]:
        """Seconds, the pause of every update, and the responses."""
        tokens, pauses = self.config.sampling.max_response_tokens, []
        started = time.monotonic()
        requests = asyncio.gather(
            *(self.engine.sample(f"{name}-{i}", ids, GROUP, max_tokens=tokens) for i, ids in enumerate(self.prompts))
        )
        for index in range(updates):
            await asyncio.sleep(max(0.0, started + expected_s * (index + 1) / (updates + 1) - time.monotonic()))
            await self._publish()
            pauses.append(sum(self.receiver.seconds[part] for part in ("pause", "load", "resume")))
        groups = await requests
        return time.monotonic() - started, pauses, groups

    async def _publish(self) -> None:
        version = len(self.versions)
        rng = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters() if version else ():
                parameter.add_(self.step * torch.randn(parameter.shape, generator=rng).sign())
        self.versions[version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.publisher.publish(version, self.model.state_dict().items(), torch.float32)
        await asyncio.to_thread(self.publisher.wait, 60)

    def _gap(self, groups: list[list[Sampled]]) -> np.ndarray:
        """Differences in nats, of the tokens after the first seam; of one response a prompt."""
        out = []
        for prompt, (sample, *_) in zip(self.prompts, groups, strict=True):
            ids = torch.tensor(np.concatenate([prompt, sample.token_ids]), dtype=torch.long)
            ends = [run.start for run in sample.versions[1:]] + [len(sample.token_ids)]
            for run, end in list(zip(sample.versions, ends, strict=True))[1:]:
                with torch.no_grad():
                    weights = self.versions[run.version]
                    logits = torch.func.functional_call(self.model, weights, (ids[None, :-1],), tie_weights=True).logits
                scores = logits[0].log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()
                out.append(np.abs(scores[run.start : end] - sample.logprobs[run.start : end]))
        return np.concatenate(out) if out else np.zeros(0)

    async def _heartbeat(self) -> None:
        while not self.receiver.stopped.is_set():
            state, host = self.receiver.state, socket.gethostname()
            member = Member("g1", "generator", state, self.receiver.version, self.receiver.epoch, host, os.getpid(), {})
            await asyncio.to_thread(self.broker.heartbeat, member)
            await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(BrokerConfig(maxmemory_mb=256)).start(Path(folder)) as server:
        config = configure(arguments.model.resolve(), arguments.tokens, server)
        result = {"model": arguments.model.name, **asyncio.run(Bench(config, arguments.step).run())}
    if not arguments.json:
        for policy in ("keep", "recompute"):
            print(f"{policy}: {result[policy]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
