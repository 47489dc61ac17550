"""The store at which the learner's nodes meet."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore

from broker.meeting import VARIABLE, open_store
from common.errors import ConfigError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_store_is_there_for_others_and_keeps_what_one_that_left_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(port := free_port()))
    store = open_store()
    assert store is not None
    first = TCPStore("127.0.0.1", port, is_master=False)
    first.set("round", "3")
    del first
    assert TCPStore("127.0.0.1", port, is_master=False).get("round") == b"3"


def test_store_can_be_reached_from_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(port := free_port()))
    store = open_store()
    assert store is not None
    addresses = {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
    for address in {*map(str, addresses), "127.0.0.2"}:  # another address of this machine than the one it was opened on
        socket.create_connection((address, port), timeout=5).close()


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert open_store() is None


@pytest.mark.parametrize("value", ["store", "0", "70000", "-1"])
def test_impossible_port_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=VARIABLE):
        open_store()


def test_taken_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(free_port()))
    store = open_store()
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store()
    del store
