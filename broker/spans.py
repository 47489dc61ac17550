"""Lives that have ended, as OpenTelemetry spans over OTLP/HTTP: a trace per life, a span for each stretch of it.

Trace and span ids follow from the run and the group, so a life that is sent again, by a service that was started
again, is the same trace. Headers, such as a token, are the SDK's: OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker.store import Broker
from broker.tracing import ENDS, Event, in_order
from common.log import Logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_WAIT_MS = 500
_EXPORT_S = 5.0
_OPEN_LIVES = 10_000
# The stretch that an event ends.
STRETCHES = {
    "leased": "queued",
    "sampled": "sampling",
    "scored": "scoring",
    "submitted": "submitting",
    "filtered": "submitting",
    "taken": "waiting",
    "trained": "training",
    "settled": "unsettled",
    "reclaimed": "held",
}


class Exporter:
    """Follows the trace stream and sends every life that has ended, once. A collector that does not answer costs the
    lives that end meanwhile their spans, and one warning."""

    def __init__(self, broker: Broker, endpoint: str, log: Logger) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would say every failure, in several lines
        self._broker, self._log = broker, log
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._lives: dict[str, list[Event]] = {}
        self._leases: dict[str, str] = {}
        self._seen, self._failed = "0", False

    def run(self, stopping: threading.Event) -> None:
        """Follow until `stopping`, then send what has ended by then."""
        try:
            while not stopping.is_set():
                self.look(_WAIT_MS)
            while self.look(0):
                pass
            self._exporter.shutdown()
        except Exception as error:  # no trace is worth a run
            self._log.warning("traces are sent no more: %s: %s", type(error).__name__, error)

    def look(self, block_ms: int) -> bool:
        """Take in what is new and send what has ended. Returns whether there was anything."""
        self._seen, events = self._broker.trace_after(self._seen, block_ms)
        ended: list[list[Event]] = []
        for event in events:
            group_id = event.group_id or self._leases.pop(event.detail, "")
            if not group_id:
                continue
            if event.name == "leased":
                self._leases[event.detail] = group_id
            life = self._lives.setdefault(group_id, [])
            life.append(event)
            if event.name in ENDS:
                ended.append(self._forget(group_id))
        while len(self._lives) > _OPEN_LIVES:
            self._forget(next(iter(self._lives)))
        self._send([span for life in ended if len(life) > 1 for span in spans(self._broker.config.run.run_id, life)])
        return bool(events)

    def _forget(self, group_id: str) -> list[Event]:
        life = self._lives.pop(group_id)
        for event in life:
            self._leases.pop(event.detail, None)
        return in_order(life)

    def _send(self, found: Sequence[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if not found:
            return
        sent = self._exporter.export(found) is SpanExportResult.SUCCESS
        if not sent and not self._failed:
            self._log.warning("traces: the collector takes no spans; those of lives that end meanwhile are lost")
        self._failed = not sent


def spans(run_id: str, life: Sequence[Event]) -> list[ReadableSpan]:
    """The spans of a life: one over all of it, which carries the events, and in it one for each stretch."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event as SpanEvent
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags

    group_id = next(event.group_id for event in life if event.group_id)
    resource = Resource({"service.name": "headrace", "headrace.run": run_id})

    def context(part: str) -> SpanContext:
        span_id = _digest(run_id, group_id, str(life[0].at_ms), part, size=8)
        trace_id = _digest(run_id, group_id, size=16)
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    root = context("")

    def span(name: str, begin: Event, end: Event, parent: SpanContext | None, **more: Any) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=root if parent is None else context(f"{name} {end.at_ms} {end.name} {end.detail}"),
            parent=parent,
            resource=resource,
            start_time=begin.at_ms * 1_000_000,
            end_time=end.at_ms * 1_000_000,
            **more,
        )

    events = [SpanEvent(each.name, _attributes(each), each.at_ms * 1_000_000) for each in life]
    whole = {"headrace.group": group_id, "headrace.end": life[-1].name}
    found = [span("prompt", life[0], life[-1], None, attributes=whole, events=events)]
    for before, after in itertools.pairwise(life):
        name = STRETCHES.get(after.name, f"until {after.name}")
        found.append(span(name, before, after, root, attributes=_attributes(after)))
    return found


def _attributes(event: Event) -> dict[str, str | int]:
    values = {"headrace.member": event.member, "headrace.version": event.version, "headrace.detail": event.detail}
    return {name: value for name, value in values.items() if value not in ("", None)}  # type: ignore[misc]


def _digest(*parts: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=size).digest())
