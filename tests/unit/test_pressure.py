"""When a producer says that the server is full, and that it is not any more."""

from __future__ import annotations

import logging

import pytest

from broker.pressure import QUIET_S, Pressure


def test_pressure_near_the_limit_says_its_two_lines_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headrace.broker")
    now = [100.0]
    monkeypatch.setattr("broker.pressure.time.monotonic", lambda: now[0])
    pressure = Pressure("redis://h")
    pressure.accepted()
    for _ in range(4):  # a large group is refused, a small one is not
        pressure.refused("at its limit")
        pressure.accepted()
        now[0] += 2.0
    assert pressure.seconds == 6.0
    now[0] += QUIET_S
    pressure.accepted()
    pressure.accepted()
    assert pressure.seconds == 6.0
    assert [record.getMessage() for record in caplog.records] == [
        "broker redis://h: full, producers wait: at its limit",
        "broker redis://h: takes prompts and groups again; it was full for 6.0 s",
    ]
    pressure.refused("again")
    assert len(caplog.records) == 3
