"""What a generator has sampled of unfinished groups, on its way to whoever goes on with them.

What it promises: a generator that leaves loses no token of them; one that is killed loses at most
`generator.handoff_tokens` of each response. None of it is ever waited for: where the broker takes no more, or the lease
is gone, the prompt is sampled afresh, which costs tokens and nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from broker import Broker, BrokerFullError, Lease
from common.config import Config
from common.errors import HeadraceError
from common.log import Logger
from common.trajectory import PartialGroup, PartialResponse
from generator.engine import Report
from generator.responses import usable


@dataclass
class Work:
    """A leased prompt and what there is of its responses, by index; `kept` tokens of each are in the broker."""

    lease: Lease
    responses: list[PartialResponse] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    keeping: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        if self.lease.partial is not None:
            self.responses = list(self.lease.partial.responses)
            self.kept = self.lengths()

    def lengths(self) -> list[int]:
        return [len(response.token_ids) for response in self.responses]

    @property
    def ahead(self) -> int:
        """Tokens by which the response that has grown most is ahead of what is kept of it."""
        return max((now - kept for now, kept in zip(self.lengths(), self.kept, strict=True)), default=0)


class Handover:
    """Keeps what one generator samples, and takes over what others have kept.

    Attributes:
        counts: tokens. `continued`: taken over, to go on from. `handed_over`: given to others when leaving.
            `sampled_twice`: that others have to sample again or have sampled again, as far as this generator knows.
    """

    def __init__(self, config: Config, generator_id: str, broker: Broker, log: Logger) -> None:
        self.config, self.id, self.broker, self.log = config, generator_id, broker, log
        self.counts = dict.fromkeys(("continued", "handed_over", "sampled_twice"), 0)

    def begin(self, work: Work, version: int) -> list[PartialResponse]:
        """What the responses go on from in an engine that samples with `version`."""
        left = sum(work.lengths())
        work.responses = list(usable(work.lease.partial, self.config, version))
        work.kept = work.lengths()
        continued = sum(work.kept)
        self.counts["continued"] += continued
        self.counts["sampled_twice"] += left - continued
        return list(work.responses)

    def reporter(self, work: Work) -> Report:
        """To be told of `work`'s responses as they grow."""

        def report(index: int, response: PartialResponse) -> None:
            work.responses[index] = response
            if self._due(work) and work.keeping is None:
                work.keeping = asyncio.create_task(self._keep_while_due(work))

        return report

    def _due(self, work: Work) -> bool:
        return 0 < self.config.generator.handoff_tokens <= work.ahead

    async def _keep_while_due(self, work: Work) -> None:
        try:
            while self._due(work):  # first run when the siblings that grew in the same engine step have reported too
                await self._keep(work)
        finally:
            work.keeping = None

    async def _keep(self, work: Work) -> bool:
        """Keep what there is of `work`; one that is refused is not tried again before it has grown as much."""
        work.kept = work.lengths()
        lease = work.lease
        partial = PartialGroup(lease.prompt.group_id, tuple(work.responses), self.config.sampling.temperature)
        try:
            return await asyncio.to_thread(self.broker.keep_partial, self.id, lease.entry_id, partial)
        except BrokerFullError:
            return False
        except HeadraceError as error:
            self.log.warning("prompt %s: what was sampled is not kept: %s", lease.prompt.group_id, error)
            return False

    async def give_back(self, work: Work) -> None:
        """Release the prompt again, with what there is of it."""
        if work.keeping is not None:
            await work.keeping
        tokens = sum(work.lengths())
        if tokens:
            self.counts["handed_over" if await self._keep(work) else "sampled_twice"] += tokens
        await asyncio.to_thread(self.broker.give_back, self.id, work.lease.entry_id, work.lease.prompt)
