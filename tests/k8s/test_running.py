"""The rendered pods of a small run, run: see `tests.k8s.pods` for what is real and what is not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from k8s import chart
from tests.k8s import sandbox
from tests.k8s.manifests import COMBINATIONS, Manifest, of_kind, parse, pod_templates
from tests.k8s.pods import ROOT, Cluster, Pod, PodFailed

pytestmark = pytest.mark.skipif(bool(sandbox.missing()), reason=sandbox.missing())
STEPS = 30


def release(**values: object) -> tuple[Manifest, ...]:
    """The CPU combination with the tiny run of the examples, its reward on a volume, as docs/kubernetes.md has it."""
    run = (ROOT / "examples/tiny.yaml").read_text().replace("examples.tiny_reward:", "tiny_reward:")
    python_path = [{"name": "PYTHONPATH", "value": "/code"}]
    given = yaml.safe_load(COMBINATIONS["cpu"].read_text())
    merged = {
        **given,
        "run": run,
        "overrides": {"model.path": "/models/tiny", "learner.max_steps": STEPS},
        "models": {"existingClaim": "models", "offline": True},
        "extraVolumes": [{"name": "code", "configMap": {"name": "my-reward"}}],
        "extraVolumeMounts": [{"name": "code", "mountPath": "/code", "readOnly": True}],
        "generator": {**given["generator"], "replicas": 2, "extraEnv": python_path},
        "learner": {**given["learner"], "extraEnv": python_path},
        "coordinator": {"extraEnv": python_path},
        **values,
    }
    reward = {"tiny_reward.py": (ROOT / "examples/tiny_reward.py").read_text()}
    own = {"kind": "ConfigMap", "metadata": {"name": "my-reward"}, "data": reward}
    texts = [*chart.render(merged, "my-run", "rl"), chart.secret("my-run-redis", "rl")]
    return (*map(parse, texts), own)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Cluster]]:
    """Pods of manifests, with the model in its claim; one cluster a test."""
    made: list[Cluster] = []

    def start(manifests: tuple[Manifest, ...]) -> Cluster:
        made.append(Cluster(manifests, tmp_path / "node"))
        models = made[0].claim("models", 10001) / "tiny"
        shutil.copytree(tiny_model, models)
        for file in models.iterdir():
            file.chmod(0o644)  # whoever fills a claim lets others read it
        return made[0]

    yield start
    for each in made:
        each.close()


def metrics(coordinator: Pod) -> dict[str, float]:
    """The coordinator's families of the run, sums over labels."""
    answer = coordinator.get("/metrics")
    found: dict[str, float] = {}
    if answer.ok:
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_rendered_pods_train_and_their_probes_say_what_they_do(run: Callable[..., Cluster]) -> None:
    here = run(release())
    (valkey,), (coordinator,), (learner,) = here.of("valkey"), here.of("coordinator"), here.of("learner")
    first, second = here.of("generator")

    valkey.start()
    valkey.until("startup")
    assert valkey.probe("readiness").ok and valkey.probe("liveness").ok
    coordinator.start()
    coordinator.until("startup")
    coordinator.until("readiness")

    # Loading: neither alive nor ready, which the startup probe waits for. Then without weights: alive, not ready.
    for generator in (first, second):
        generator.start()
    for generator in (first, second):
        generator.until("startup", False, "loading")
        assert not generator.probe("readiness").ok
    for generator in (first, second):
        generator.until("startup")
        answer = generator.probe("readiness")
        assert not answer.ok and "syncing" in answer.text
        assert generator.probe("liveness").ok
    learner.start()
    learner.until("startup", False, "loading")
    assert not learner.probe("readiness").ok
    learner.until("startup")
    learner.until("readiness")
    for generator in (first, second):
        generator.until("readiness")

    # Serving; one is taken away in the middle of the run, the other finishes it.
    seen = [metrics(coordinator)]
    while seen[-1]["headrace_policy_version"] < 2:
        for pod in here.pods:
            pod.lives()
            assert pod.probe("liveness").ok
        time.sleep(0.2)
        seen.append(metrics(coordinator))
    assert seen[-1]["headrace_policy_version"] < STEPS, "the run was over before a generator was taken away"
    first.delete()
    while first.probe("readiness").ok:
        time.sleep(0.05)
    assert first.ended() == 0, first.tail()
    assert "gone: groups=" in first.tail()
    while learner.code() is None:
        seen.append(metrics(coordinator) or seen[-1])
        time.sleep(0.2)
    assert learner.code() == 0, learner.tail()
    assert (coordinator.ended(), second.ended()) == (0, 0), coordinator.tail() + second.tail()
    assert int(second.tail().rsplit("gone: groups=", 1)[1].split()[0]) > 0
    assert {reading["headrace_conservation_error"] for reading in seen} == {0.0}
    assert seen[-1]["headrace_groups_trained_total"] > seen[0]["headrace_groups_trained_total"]
    (state,) = here.claim("my-run-runs", 10001).glob(f"my-run/checkpoints/step-*{STEPS}/state.json")
    assert state.stat().st_uid == 10001
    valkey.delete()
    assert valkey.ended() == 0


# --- what such a test is worth: each fault planted in the manifests is seen


def container(manifests: tuple[Manifest, ...], ending: str) -> Manifest:
    (owner,) = [each for each in manifests if pod_templates(each) and each["metadata"]["name"].endswith(ending)]
    found: Manifest = pod_templates(owner)[0]["spec"]["containers"][0]
    return found


@pytest.mark.long
@pytest.mark.parametrize("component", ["coordinator", "learner", "generator"])
def test_command_with_an_option_it_does_not_have_ends_with_2(run: Callable[..., Cluster], component: str) -> None:
    manifests = release()
    container(manifests, component)["command"].append("--nodes=2")
    pod = run(manifests).of(component)[0]
    pod.start()
    with pytest.raises(PodFailed, match=r"ended with 2:[^$]*No such option"):
        pod.until("startup")


@pytest.mark.long
def test_password_that_is_missing_or_of_another_role_is_refused(run: Callable[..., Cluster]) -> None:
    manifests = release()
    (secret,) = of_kind(manifests, "Secret")
    here = run(manifests)
    (valkey,), (coordinator,), (learner,) = here.of("valkey"), here.of("coordinator"), here.of("learner")
    valkey.start()
    valkey.until("startup")
    secret["stringData"]["broker"] = secret["stringData"]["generator"]
    coordinator.start()
    with pytest.raises(PodFailed, match="user headrace-broker: the password was refused"):
        coordinator.until("startup")
    del secret["stringData"]["learner"]
    with pytest.raises(KeyError, match="learner"):
        learner.start()


@pytest.mark.long
@pytest.mark.parametrize(("place", "value"), [("lifecycle", {"preStop": {}}), ("envFrom", []), ("workingDir", "/")])
def test_field_that_nobody_would_act_on_is_an_error(run: Callable[..., Cluster], place: str, value: object) -> None:
    manifests = release()
    container(manifests, "generator")[place] = value
    with pytest.raises(AssertionError, match=f"nobody here knows .'{place}'"):
        run(manifests)
