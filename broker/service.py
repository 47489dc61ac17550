"""The broker service: feeder and evaluator in threads, the reclaimer and the service's own heartbeat in the main one.

It ends when the run is finished, or on SIGTERM or SIGINT. It holds nothing that Redis does not, but for the store where
an elastic learner's nodes meet (`broker.elastic`), so it may be killed and started again at any time.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from prometheus_client import CollectorRegistry

from broker.autoscale import Autoscaler
from broker.elastic import hosting
from broker.evaluator import Evaluator
from broker.exporter import RunCollector
from broker.feeder import Feeder
from broker.hunger import observe
from broker.page import Page
from broker.pageguard import token_of
from broker.reading import REFRESH_S, Reading, read
from broker.records import Member
from broker.sources import load_tokenizer, open_source
from broker.spans import Exporter
from broker.store import Broker
from common import log as logging
from common.config import Config
from common.exposition import expose
from common.health import Health
from common.log import Logger

LINGER_S = 30.0  # as long as `headrace up` waits for generators


class Watch:
    """The service's latest reading of the run, and the port and the page that show it.

    Args:
        config: the run.
        generators: that are there already, and stay where this service was started again.
    """

    def __init__(self, config: Config, generators: int) -> None:
        self.reading: Reading | None = None
        self.page: Page | None = None
        self._config, self._scaler = config, Autoscaler(config.autoscale, config.learner.groups_per_step, generators)
        self.health = Health(config.metrics.stalled_s)
        registry = CollectorRegistry()
        registry.register(RunCollector(config, lambda: self.reading, lambda: self._scaler.wish.generators))
        self._open = lambda: expose(config.metrics, self.health, registry)

    @property
    def every_s(self) -> float:
        """How often to look: a page is to move, however rarely heartbeats come."""
        heartbeat_s = self._config.broker.heartbeat_s
        return heartbeat_s if self.page is None else min(heartbeat_s, REFRESH_S)

    def look(self, broker: Broker) -> None:
        """Read the run anew, where anybody can see it: it takes a dozen commands."""
        if self._config.metrics.port is None and self.page is None:
            return
        self.reading = read(broker)
        self._scaler.observe(observe(self._config, self.reading.members, self.reading.queues, self.reading.at))
        self.health.beat()
        self.health.ready_when(lambda: "")
        if self.page is not None:
            self.page.show(broker, self.reading)

    def linger(self, broker: Broker, stop: threading.Event) -> None:
        """Of a run that is finished: while somebody looks at the page, show how the generators leave, then the end."""
        if self.page is None:
            return
        deadline = time.monotonic() + LINGER_S
        while self.page.viewers and not stop.is_set() and time.monotonic() < deadline:
            self.look(broker)
            if self.reading is None or not self.reading.in_role("generator"):
                break
            stop.wait(self.every_s)
        self.page.show(broker, read(broker), finished=True)

    @contextmanager
    def showing(self, tokenizer: Any, log: Logger) -> Iterator[None]:
        """Serve the page meanwhile, where it is wanted. ConfigError as `Page`."""
        if not self._config.page.served:
            yield
            return
        self.page = Page(self._config, partial(tokenizer.decode, skip_special_tokens=True), log)
        try:
            yield
        finally:
            page, self.page = self.page, None
            page.close()

    def __enter__(self) -> None:
        self._close = self._open()

    def __exit__(self, *_: object) -> None:
        self._close()


def run_service(config: Config, stopping: threading.Event | None = None) -> int:
    """Serve the run until it is finished or told to stop. Returns the exit code, 0.

    Args:
        config: the run.
        stopping: set it to stop the service; by default, and in the main thread only, SIGTERM and SIGINT do.

    Raises:
        HeadraceError: the source cannot be opened, or the server is gone for longer than `broker.reconnect_s`.
    """
    log = logging.setup(config.run.run_id, "broker")
    if config.page.served:
        token_of(config.page)  # before anything is taken
    broker = Broker.connect(config)
    watch = Watch(config, len(broker.members("generator")))
    with stop_signal(stopping) as stop, watch:
        try:
            tokenizer = load_tokenizer(config)
            feeder = Feeder(broker, open_source(config.prompts, config, tokenizer), log)
            evaluator = None
            if config.eval is not None and config.eval.every:
                source = open_source(config.eval.prompts, config, tokenizer, shuffle=False)
                evaluator = Evaluator(broker, config.eval, source, log)
            exporter = None
            if config.tracing.sample > 0 and config.tracing.endpoint is not None:
                exporter = Exporter(broker, config.tracing.endpoint, log)
            with hosting(broker, config, log), watch.showing(tokenizer, log):
                _serve(broker, feeder, evaluator, exporter, watch, stop, log)
        finally:
            broker.close()
    return 0


def _serve(
    broker: Broker,
    feeder: Feeder,
    evaluator: Evaluator | None,
    exporter: Exporter | None,
    watch: Watch,
    stop: threading.Event,
    log: Logger,
) -> None:
    failures: list[BaseException] = []

    def work(run: Callable[[threading.Event], None]) -> None:
        try:
            run(stop)
        except BaseException as error:  # raised again by the main thread, which ends the process
            failures.append(error)
            stop.set()

    # A finish from before a resumed run: it counts only once a learner has begun and cleared it.
    stale = broker.finished()
    member_id = f"broker-{socket.gethostname()}-{os.getpid()}"
    log.info("broker serves from prompt %d on, budget %d groups", broker.position(), broker.config.max_outstanding)
    threads = [threading.Thread(target=work, args=(feeder.run,), name="feeder", daemon=True)]
    if evaluator is not None:
        threads.append(threading.Thread(target=work, args=(evaluator.run,), name="evaluator", daemon=True))
    if exporter is not None:
        threads.append(threading.Thread(target=work, args=(exporter.run,), name="traces", daemon=True))
    for thread in threads:
        thread.start()
    while not stop.is_set():
        _tick(broker, feeder, member_id, log)
        watch.look(broker)
        finished = broker.finished()
        stale = stale and finished
        if finished and not stale:
            log.info("the run is finished")
            watch.linger(broker, stop)
            break
        stop.wait(watch.every_s)
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if evaluator is not None:
        if broker.finished() and not stale:
            evaluator.finish()
        evaluator.close()
    broker.leave(member_id)
    log.info("broker stops, %d prompts released by this process", feeder.released)


def _tick(broker: Broker, feeder: Feeder, member_id: str, log: Logger) -> None:
    version = broker.version()
    log.version = str(version)
    broker.heartbeat(
        Member(
            id=member_id,
            role="broker",
            state="serving",
            version=version,
            host=socket.gethostname(),
            pid=os.getpid(),
            counters={"released": float(feeder.released), "broker_full_s": broker.pressure.seconds},
        )
    )
    for entry_id, consumer in broker.reclaim():
        log.warning("lease %s of %s taken back", entry_id, consumer)


@contextmanager
def stop_signal(given: threading.Event | None) -> Iterator[threading.Event]:
    """`given`, else an event that SIGTERM and SIGINT set (in the main thread only)."""
    if given is not None:
        yield given
        return
    event = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
