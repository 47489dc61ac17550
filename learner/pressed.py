"""Whether the broker is full, as the learner sees it: by what the producers say in their heartbeats."""

from __future__ import annotations

from broker import Broker


class Pressed:
    """Not thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._before: dict[str, float] = {}

    def now(self) -> bool:
        """Whether a producer was refused since the last call; one seen for the first time does not count."""
        seconds = {member.id: member.counters.get("broker_full_s", 0.0) for member in self._broker.members()}
        pressed = any(value > self._before.get(name, value) for name, value in seconds.items())
        self._before = seconds
        return pressed
