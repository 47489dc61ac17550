"""Experiment trackers can neither stop nor slow a run, and a resumed run does not write a step twice."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common import checks, tracking
from common.config import Config
from common.errors import ConfigError
from common.log import Logger
from common.metrics import MetricSink
from common.trackers import KINDS, Kind, Target
from common.tracking import Background, Trackers, without_secrets

LOG = Logger("run", "learner-0")


def configured(folder: Path, **fields: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "id": "test-1", "dir": folder},
            "model": {"path": "models/tiny"},
            "prompts": {"type": "dataset", "path": "train.jsonl"},
            "reward": {"type": "math_verify"},
            "tracking": fields,
        }
    )


class Taking:
    """A tracker that keeps what it is given; it can be held up, and can fail at a step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.steps: list[int] = []
        self.closed = False
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()
        self._fails_at = fails_at

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.reached.set()
        assert self.go.wait(30)
        if step == self._fails_at:
            raise ConnectionError(f"http://me:geheim@tracker/api refused step {step}")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def written(sink: MetricSink, steps: range, mark: Path | None = None, size: int = 256) -> Background:
    background = Background("fake", lambda: sink, LOG, mark, size)
    for step in steps:
        background.write(step, {"loss": 1.0})
    background.finish()
    background.join(30)
    return background


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_record_reaches_tracker_in_order_and_it_is_closed() -> None:
    sink = Taking()
    written(sink, range(1, 100))
    assert sink.steps == list(range(1, 100))
    assert sink.closed


def test_tracker_that_fails_is_off_after_one_warning_without_credentials(caplog: pytest.LogCaptureFixture) -> None:
    sink = Taking(fails_at=3)
    written(sink, range(1, 10))
    assert sink.steps == [1, 2]
    assert warnings(caplog) == [
        "tracker fake is off from now on: ConnectionError: http://***@tracker/api refused step 3"
    ]


def test_tracker_that_cannot_be_opened_is_off_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> MetricSink:
        raise SystemExit("no such project")

    background = Background("fake", fail, LOG, None)
    background.write(1, {"loss": 1.0})
    background.finish()
    background.join(30)
    background.write(2, {"loss": 1.0})
    assert warnings(caplog) == ["tracker fake is off from now on: SystemExit: no such project"]


def test_tracker_that_hangs_costs_records_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    sink = Taking()
    sink.go.clear()
    background = Background("fake", lambda: sink, LOG, None, size=4)
    background.write(1, {"loss": 1.0})
    assert sink.reached.wait(30)
    for step in range(2, 10):  # returns though nothing is taken
        background.write(step, {"loss": 1.0})
    background.finish()
    background.join(0.0)
    sink.go.set()
    background._thread.join(30)
    assert sink.steps == [1, 2, 3, 4, 5]
    assert warnings(caplog) == [
        "tracker fake is too slow: records are dropped, step 6 first",
        "tracker fake did not end in time; its last records may be missing",
        "tracker fake lost 4 records, which were dropped",
    ]


def test_resumed_run_does_not_write_a_step_again_that_the_tracker_has(tmp_path: Path) -> None:
    mark = tmp_path / "tracking" / "fake-train.step"
    first, second = Taking(), Taking()
    written(first, range(1, 6), mark)
    written(second, range(4, 9), mark)  # 4 and 5 were taken back
    assert first.steps == [1, 2, 3, 4, 5]
    assert second.steps == [6, 7, 8]


def test_mark_that_a_crash_cut_off_is_no_mark(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("")
    sink = Taking()
    written(sink, range(1, 3), mark)
    assert sink.steps == [1, 2]


def test_trackers_that_hang_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def hang(target: Target) -> MetricSink:
        hold.wait(30)
        return Taking()

    monkeypatch.setattr(tracking, "CLOSE_S", 0.05)
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(KINDS, name, Kind(hang, True))  # type: ignore[misc]
    config = configured(tmp_path, trackers=["wandb", "mlflow", "trackio"])
    sink = Trackers(Target(config, "train", 1, {}), LOG)
    sink.write(1, {"loss": 1.0})
    waited: list[float] = []
    for each in sink._each:
        join = each._thread.join
        monkeypatch.setattr(each._thread, "join", lambda timeout, join=join: (waited.append(timeout), join(timeout)))
    sink.close()
    hold.set()
    assert sum(waited) <= 0.06
    assert len(waited) == 3


def test_secrets_of_the_environment_are_taken_out_of_a_message() -> None:
    environ = {"WANDB_API_KEY": "abcdef", "MLFLOW_TRACKING_PASSWORD": "geheim", "HF_TOKEN": "", "HOME": "/root"}
    text = "key abcdef of https://user:geheim@host/root and geheim in /root"
    assert without_secrets(text, environ) == "key *** of https://***@host/root and *** in /root"


def test_unset_package_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking\.trackers: 'wandb' .* pip install 'headrace\[wandb\]'"):
        checks.check(configured(tmp_path, trackers=["wandb"]))


@pytest.mark.parametrize(
    "fields, environ, message",
    [
        ({"trackers": ["mlflow"]}, {}, "MLFLOW_TRACKING_URI"),
        ({"trackers": ["trackio"], "offline": True}, {"TRACKIO_SPACE_ID": "me/space"}, "TRACKIO_SPACE_ID is set"),
    ],
)
def test_tracker_without_a_place_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        checks.check(configured(tmp_path, **fields))


def test_tracker_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names a tracker twice"):
        configured(tmp_path, trackers=["tensorboard", "tensorboard"])


def test_every_tracker_of_the_configuration_has_a_kind() -> None:
    field = Config.model_json_schema()["$defs"]["TrackingConfig"]["properties"]["trackers"]
    assert set(KINDS) == set(field["items"]["enum"])


# --- the packages themselves, where they are installed

def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for name, path in (("train/loss", "tensorboard"), ("eval/loss", "tensorboard/eval")):
        events = EventAccumulator(str(folder / path))
        events.Reload()
        found[name] = [(event.step, event.value) for event in events.Scalars(name)]
        (text,) = events.Tensors("configuration/text_summary")[-1].tensor_proto.string_val
        assert b"commit: abc" in text and b"path: models/tiny" in text
    return found


def read_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{folder}/tracking/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["test-1", "test-1-eval"]
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for run in runs
        for name in run.data.metrics
    }


def read_trackio(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with contextlib.closing(sqlite3.connect(folder / "tracking" / "headrace.db")) as database:
        rows = [
            (json.loads(text), step) for text, step in database.execute("SELECT metrics, step FROM metrics ORDER BY id")
        ]
    names = {name for values, _ in rows for name in values}
    return {name: [(step, values[name]) for values, step in rows if name in values] for name in names}


def read_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """From the offline runs' files: a header of 7 bytes, then records of CRC, length, kind and a protobuf message."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((folder / "tracking" / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        data, at = file.read_bytes(), 7
        while at + 7 <= len(data):
            _, length, kind = struct.unpack_from("<IHB", data, at)
            assert kind == 1, "a record in several parts: the file is larger than this test expects"
            record = proto.Record.FromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            for item in record.history.item if record.HasField("history") else ():
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    found.setdefault(name, []).append((record.history.step.num, float(item.value_json)))
    return found


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.parametrize("name", READERS)
def test_real_tracker_holds_every_step_once_after_a_resume(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path, trackers=[name], offline=True)
    monkeypatch.setenv("TRACKIO_DIR", str(config.run.folder / "tracking"))
    pytest.importorskip(name)
    if name == "mlflow":
        pytest.importorskip("sqlalchemy")
    monkeypatch.setattr(tracking, "CLOSE_S", 60.0)
    for part, first, last in (("train", 1, 3), ("train", 3, 5), ("eval", 2, 2)):
        sink = Trackers(Target(config, part, first, {"commit": "abc"}), LOG)
        for step in range(first, last + 1):
            sink.write(step, {"loss": float(step)})
        sink.close()
    assert warnings(caplog) == []
    assert READERS[name](config.run.folder) == {
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)],
        "eval/loss": [(2, 2.0)],
    }


def test_mlflow_experiment_that_the_runs_other_process_makes_meanwhile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    client = pytest.importorskip("mlflow").MlflowClient
    pytest.importorskip("sqlalchemy")
    config, look, looked = configured(tmp_path, trackers=["mlflow"], offline=True), client.get_experiment_by_name, []

    def too_early(self: Any, name: str) -> Any:
        looked.append(name)
        return None if len(looked) == 2 else look(self, name)

    monkeypatch.setattr(client, "get_experiment_by_name", too_early)
    for part in ("train", "eval"):
        sink = KINDS["mlflow"].open(Target(config, part, 1, {}))
        sink.write(1, {"loss": 1.0})
        sink.close()
    assert len(looked) == 3
    assert "http" not in capfd.readouterr().out, "a server's URL may hold a password"
    assert set(read_mlflow(config.run.folder)) == {"train/loss", "eval/loss"}
