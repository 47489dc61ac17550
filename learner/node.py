"""One node of the learner: torchrun's elastic agent around this node's ranks. `headrace learner` becomes this.

Nodes meet in a store in the broker service (`broker.elastic`), so that none of them is needed for the others to go on;
a single fixed node brings its own. What it promises:

- a node that gets SIGTERM, or sees another one come, lets its ranks finish their step and save (`learner.loop`); a node
  that was lost costs what was trained since the newest snapshot. Either way the nodes there are form the next round;
- a broker service that was started again has a new store: the ranks leave as for a resize, and the nodes meet there;
- it ends with 0 when the run is complete or it was told to stop and everything is saved, with `PERMANENT` where
  starting again cannot help, with 1 where a stop could not save, and after `max_failures` failures in a row between
  which no group became durable.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from broker import Broker
from broker.addresses import LOOPBACK, own_address
from common import log as logs
from common.config import Config
from common.config_elastic import ElasticConfig
from common.errors import HeadraceError
from common.log import Logger
from learner.main import LEAVING, PERMANENT
from learner.meeting import Meeting

_CONNECT = timedelta(seconds=10)
_LOOK_S = 0.1
_RETRY_S = 0.5


class _Agent(LocalElasticAgent):
    """torchrun's agent for one round; it never restarts failed ranks by itself, since `Node` knows what they meant."""

    def __init__(self, spec: WorkerSpec, meeting: Meeting, grace_s: float, log: Logger) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=int(grace_s))
        self._meeting, self._grace_s, self._log = meeting, grace_s, log
        self.failed = False  # in the end, what it was told to do while it left

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        rank, nodes = worker_group.group_rank, worker_group.group_world_size
        self._log.info("round formed: node %s of %s, rank 0 at %s", rank, nodes, worker_group.master_addr)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._log.info("another node has come: the ranks leave")
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        nodes = worker_group.group_world_size or 1
        # Without a connection that breaks, which the ranks would notice. One that is alone was only asleep.
        if result.state == WorkerState.HEALTHY and nodes > 1 and self._meeting.nodes < nodes:
            self._log.warning("another node has gone: the ranks leave")
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        super()._shutdown(death_sig, int(self._grace_s))
        # Of the first rank, which saves; what the others end with may follow from its going.
        first = getattr(self._pcontext, "subprocess_handlers", {}).get(0)
        self.failed = first is not None and first.proc.poll() not in (0, LEAVING, -signal.SIGTERM)

    def _exit_barrier(self) -> None:
        """Nobody needs this node any more: the store is elsewhere."""


class Node:
    """This node, from its start to its exit code.

    Args:
        config: the run.
        arguments: command line of a rank, after the interpreter.
    """

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        self.config, self.log = config, logs.setup(config.run.run_id, "node")
        self._arguments = tuple(arguments)
        self._elastic = config.learner.elastic
        self._meeting: Meeting | None = None
        self._agent: _Agent | None = None
        self._failures, self._durable = 0, -1
        self._seen_unfinished = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _stop)
        # Shared, the store would leave with the node it is on, and a node that returns would not find it.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            return self._fixed() if self._elastic is None else self._come_and_go(self._elastic)
        except SignalException as stop:
            self.log.info("stopped by %s", stop.sigval.name)
            if self._meeting is not None:
                self._meeting.withdraw()
            if self._agent is not None and self._agent.failed:
                self.log.error("the ranks did not leave in good order: what they trained last may not be saved")
                return 1
            return 0

    # --- a single node

    def _fixed(self) -> int:
        bound = socket.create_server((LOOPBACK, 0))
        port = bound.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())
        return _code(self._round(Meeting.at(store, "fixed", LOOPBACK, 1, 1)))

    # --- nodes that come and go

    def _come_and_go(self, elastic: ElasticConfig) -> int:
        self.broker = Broker.connect(self.config)
        while not self._over():
            try:
                self._meeting = self._meeting or self._meet(elastic)
                code = self._after(self._round(self._meeting), elastic)
            except RendezvousConnectionError:
                self.log.warning("the broker service's store is gone; going to the next one")
                self._forget()
                time.sleep(_RETRY_S)
            except RendezvousTimeoutError:
                self.log.info("still waiting for %d nodes", elastic.min_nodes)
            else:
                if code is not None:
                    return code
        self.log.info("the run is complete")
        return 0

    def _forget(self) -> None:
        if self._meeting is not None:
            self._meeting.forget()
            self._meeting = None

    def _meet(self, elastic: ElasticConfig) -> Meeting:
        """Go where the nodes meet.

        Raises:
            HeadraceError: there has been no such place for `broker.reconnect_s`.
            RendezvousConnectionError: there is none, and the run is over.
        """
        patience_s, started = self.config.broker.reconnect_s, time.monotonic()
        address = own_address(self.broker.url)
        while True:
            place = self.broker.meeting()
            if place is not None:
                with suppress(DistError, RendezvousConnectionError):
                    store = TCPStore(place.host, place.port, is_master=False, timeout=_CONNECT)
                    return Meeting.at(store, place.name, address, elastic.min_nodes, elastic.max_nodes)
            if time.monotonic() - started > patience_s:
                where = "none ever said where" if place is None else f"the last one was at {place.host}:{place.port}"
                raise HeadraceError(f"no broker service for {patience_s:g} s in which the nodes could meet: {where}")
            if self._over():
                raise RendezvousConnectionError
            time.sleep(_RETRY_S)

    def _round(self, meeting: Meeting) -> RunResult | None:
        """Form a round and run its ranks until they end; other nodes that come meanwhile make it a new one."""
        spec = WorkerSpec(
            role="learner",
            local_world_size=self.config.learner.ranks,
            entrypoint=sys.executable,
            args=self._arguments,
            rdzv_handler=meeting,
            max_restarts=0,
            monitor_interval=_LOOK_S,
        )
        grace_s = (self._elastic or ElasticConfig()).grace_s
        self._agent = _Agent(spec, meeting, grace_s, self.log)
        return self._agent.run()

    def _after(self, result: RunResult | None, elastic: ElasticConfig) -> int | None:
        """The node's exit code after a round; None: on to the next one."""
        code = _code(result)
        if code in (0, PERMANENT):
            return code
        if code == LEAVING:
            self.log.info("the ranks have left")
            return None
        durable = self.broker.ledger().settled
        self._failures = self._failures + 1 if durable == self._durable else 1
        self._durable = durable
        if self._failures > elastic.max_failures:
            self.log.error("%d failures in a row, and nothing became durable in between: giving up", self._failures)
            return 1
        self.log.warning("the ranks have failed; failure %d since something became durable", self._failures)
        return None

    def _over(self) -> bool:
        """Whether the run was completed while this node was there; a finish from before does not count."""
        finished = self.broker.finished()
        self._seen_unfinished = self._seen_unfinished or not finished
        return finished and self._seen_unfinished


def _code(result: RunResult | None) -> int:
    """What the exit codes of a node's ranks mean together; those that were killed since another one ended do not count.
    None: there was no room for this node, and there will not be."""
    if result is None or result.state == WorkerState.SUCCEEDED:
        return 0
    codes = {failure.exitcode for failure in result.failures.values()}
    if PERMANENT in codes:
        return PERMANENT
    return 1 if codes - {LEAVING, -signal.SIGTERM} else LEAVING


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SignalException(f"got signal {number}", signal.Signals(number))


def main(config: Config, arguments: Sequence[str]) -> int:
    return Node(config, arguments).run()
