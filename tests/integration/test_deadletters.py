"""`headrace dead`: looking at dead letters, putting them back, forgetting them, on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from broker_helpers import MakeConfig, TwiceBroker, group, ids, lease, release
from click.testing import Result
from typer.testing import CliRunner

from broker.cli_dead import app
from common.config import Config
from common.errors import HeadraceError

ERROR = "reward mine:score on prompt 000000000: ZeroDivisionError: " + "by the reward " * 10

Dead = Callable[..., Result]


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(broker={"max_attempts": 2})


@pytest.fixture
def broker(config: Config) -> Iterator[TwiceBroker]:
    connected = TwiceBroker.connect(config)
    yield connected
    connected.close()


@pytest.fixture
def dead(config: Config, tmp_path: Path) -> Dead:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return lambda command, *arguments: CliRunner().invoke(app, [command, str(path), *arguments])


def setup(broker: TwiceBroker) -> int:
    """A prompt whose reward failed, a damaged group, and bytes that belong to no release. Returns the epoch."""
    release(broker, 1)
    for _ in range(broker.config.broker.max_attempts):
        (each,) = lease(broker, 1, "g1")
        broker.fail("g1", each.entry_id, each.prompt, ERROR)
    release(broker, 1)
    (second,) = lease(broker, 1, "g1")
    broker.submit("g1", second, group(second.prompt.group_id, size=1))  # a group of 2 is configured
    broker._client.xadd(broker.keys.groups, {"x": b"\xff"})
    epoch = broker.begin(3, [])
    assert broker.take(epoch, 10, 0) == []
    ledger = broker.ledger()
    assert (ledger.dead, ledger.outstanding, ledger.balanced) == (2, 0, True)
    return epoch


def test_list_shows_what_died_of_what(broker: TwiceBroker, dead: Dead) -> None:
    setup(broker)
    lines = dead("list").output.splitlines()
    assert lines[0].split() == ["ID", "KIND", "ATTEMPTS", "AGE", "GENERATOR", "ERROR"]
    foreign, damaged, data = (line.split() for line in lines[1:])
    assert damaged[:6] == ["000000001", "damaged", "1", "0", "s", "g1"]
    assert data[:6] == ["000000000", "data", "2", "0", "s", "g1"]
    assert foreign[1:6] == ["foreign", "-", "0", "s", "-"]
    assert lines[3].endswith("...") and lines[1].endswith("no lease of this run produced it (foreign)")
    records = json.loads(dead("list", "--json", "000000000").output)
    assert [(each["id"], each["kind"], each["attempts"], each["error"]) for each in records] == [
        ("000000000", "data", 2, ERROR)
    ]


def test_show_prints_the_whole_error_and_the_prompt(broker: TwiceBroker, dead: Dead) -> None:
    setup(broker)
    text = dead("show", "000000000").output
    for expected in (ERROR, "0 + 1 =", '"answer": "0"', "3 tokens, released at version 0", "generator  g1"):
        assert expected in text
    (foreign, *_) = json.loads(dead("show", "--json").output)
    assert (foreign["kind"], foreign["prompt"]) == ("foreign", None)
    missing = dead("show", "000000007")
    assert missing.exit_code == 1
    assert "000000007: no such dead letter" in missing.output


def test_retry_puts_prompts_back_as_new_and_twice_is_once(broker: TwiceBroker, dead: Dead) -> None:
    epoch = setup(broker)
    for _ in range(2):
        result = dead("retry", "000000000", "000000001")
        assert result.exit_code == 0, result.output
        ledger = broker.ledger()
        assert (ledger.dead, ledger.outstanding, ledger.released, ledger.balanced) == (0, 2, 2, True)
    assert "000000000: no such dead letter (any more)" in result.output
    assert [each.kind for each in broker.dead_letters()] == ["foreign"]
    assert broker.outstanding_until([2, 3]) == [0, 2], "released at the current version"
    leases = lease(broker, 2, "g2")
    assert {each.prompt.attempt for each in leases} == {0}
    for each in leases:
        assert broker.submit("g2", each, group(each.prompt.group_id))
    assert sorted(ids(broker.take(epoch, 9, 0))) == ["000000000", "000000001"]


def test_retry_sent_twice_answers_that_it_was_done(broker: TwiceBroker) -> None:
    setup(broker)
    letter = broker.dead_letters()[2]
    assert broker.retry_dead(letter)  # the reply of the second copy
    assert not broker.drop_dead(letter)
    assert (broker.ledger().dead, broker.ledger().outstanding) == (1, 1)


def test_retry_of_what_holds_no_prompt_is_refused_and_the_others_go_back(broker: TwiceBroker, dead: Dead) -> None:
    setup(broker)
    result = dead("retry", "--all")
    assert result.exit_code == 1
    assert "is foreign and holds no prompt that could be sampled; drop it" in result.output
    assert (broker.ledger().dead, broker.ledger().outstanding, broker.ledger().balanced) == (0, 2, True)
    with pytest.raises(HeadraceError, match="foreign"):
        broker.retry_dead(broker.dead_letters()[0])


def test_drop_forgets_the_payload_and_keeps_the_count(broker: TwiceBroker, dead: Dead) -> None:
    setup(broker)
    entry = broker.dead_letters()[0].id  # of bytes without a group id: the entry's
    for _ in range(2):
        result = dead("drop", "000000000", entry)
        assert result.exit_code == 0
    assert [each.id for each in broker.dead_letters()] == ["000000001"]
    assert (broker.ledger().dead, broker.ledger().outstanding, broker.ledger().balanced) == (2, 0, True)


@pytest.mark.parametrize("arguments", [(), ("000000000", "--all")])
def test_retry_and_drop_want_ids_or_all(dead: Dead, arguments: tuple[str, ...]) -> None:
    for command in ("retry", "drop"):
        assert dead(command, *arguments).exit_code == 2
