"""What runs in the cluster: references lead somewhere, the environment is a configuration, pods are done right."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from common import settings
from common.config import Config
from k8s import chart
from tests.k8s.manifests import (
    COMBINATIONS,
    RUN,
    Manifest,
    combination,
    containers,
    of_kind,
    parse,
    pod_templates,
    title,
)

ROOT = Path(__file__).parents[2]
OURS = ("coordinator", "generator", "learner", "autoscaler")


def pod(name: str, component: str) -> tuple[Manifest, Manifest]:
    """Pod spec and container of a component in combination `name`."""
    for _, template, container in containers(combination(name)):
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == component and container.get("command"):
            return template["spec"], container
    raise LookupError(f"{name} has no {component}")


def environment(name: str, component: str) -> dict[str, str]:
    """The variables of a pod as its process would see them; of what the cluster fills in, the pod's address."""
    found: dict[str, str] = {}
    for variable in pod(name, component)[1]["env"]:
        value = variable.get("value", "10.0.0.7" if variable["name"] == "POD_IP" else "from-the-cluster")
        for known in found:
            value = value.replace(f"$({known})", found[known])
        found[variable["name"]] = value
    return found


def configuration(name: str, component: str) -> Config:
    return settings.load(RUN, environ=environment(name, component))


# --- references


def test_selectors_find_the_pods_they_are_for(name: str) -> None:
    manifests = combination(name)
    labels = [t["metadata"]["labels"] for each in manifests for t in pod_templates(each)]
    for each in manifests:
        selector = each.get("spec", {}).get("selector")
        if each["kind"] in ("Deployment", "StatefulSet"):
            assert selector["matchLabels"].items() <= pod_templates(each)[0]["metadata"]["labels"].items(), title(each)
        elif selector is not None:
            wanted = (selector.get("matchLabels", {}) if each["kind"] != "Service" else selector).items()
            assert any(wanted <= found.items() for found in labels), title(each)


def test_services_and_probes_name_ports_that_exist(name: str) -> None:
    manifests = combination(name)
    for service in of_kind(manifests, "Service"):
        selected = [
            {port["name"] for port in container.get("ports", ())}
            for _, template, container in containers(manifests)
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        for port in service["spec"]["ports"]:
            assert any(port["targetPort"] in names for names in selected), title(service)
    for _, _, container in containers(manifests):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how in ("httpGet", "tcpSocket"):
                port = container.get(probe, {}).get(how, {}).get("port")
                assert port is None or port in [each["name"] for each in container["ports"]]


def test_what_pods_mount_and_who_they_are_is_part_of_the_release(name: str) -> None:
    manifests = combination(name)
    own = {(each["kind"], each["metadata"]["name"]) for each in manifests}
    given = {("ConfigMap", "my-reward"), ("PersistentVolumeClaim", "models"), ("PersistentVolumeClaim", "all-runs")}
    for manifest in manifests:
        for template in pod_templates(manifest):
            spec = template["spec"]
            assert ("ServiceAccount", spec["serviceAccountName"]) in own
            volumes = {volume["name"] for volume in spec["volumes"]}
            volumes |= {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())}
            for container in spec["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes, title(manifest)
            for volume in spec["volumes"]:
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in own | given
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in own | given
            for claim in spec.get("resourceClaims", ()):
                assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in own


def test_labels_are_those_of_the_convention(name: str) -> None:
    for each in combination(name):
        for template in pod_templates(each):
            assert not {"app.kubernetes.io/version", "helm.sh/chart"} & template["metadata"]["labels"].keys()
        labels = each["metadata"]["labels"]
        for field in ("name", "instance", "component", "part-of", "version", "managed-by"):
            assert labels[f"app.kubernetes.io/{field}"], title(each)
        assert each["metadata"]["namespace"] == "rl"
        assert each["metadata"]["name"].startswith("my-run")


# --- the run's file and the environment make a configuration


def test_run_reaches_the_cluster_as_it_is(name: str) -> None:
    assert of_kind(combination(name), "ConfigMap", "-run")[0]["data"] == {"run.yaml": RUN.read_text()}


def test_file_and_environment_make_a_configuration(name: str) -> None:
    for component in OURS if name in ("no-crds", "multi-host-apply") else OURS[:3]:
        config = configuration(name, component)
        assert config.run.run_id == ("gsm8k-7" if name == "everything" else "my-run")
        assert str(config.broker.password_file) == "/etc/headrace/redis/password"
        assert config.learner.optimizer.lr == 1e-5


def test_every_role_has_a_user_and_a_password_of_its_own() -> None:
    for component, role in zip(OURS, ("broker", "generator", "learner", "reader"), strict=True):
        spec, _ = pod("no-crds", component)
        secret = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "redis")
        assert [item["key"] for item in secret["items"]] == [role]
        assert configuration("no-crds", component).broker.user == f"headrace-{role}"


def test_external_redis_reaches_the_configuration() -> None:
    tls = configuration("external-tls", "generator").broker
    assert tls.url == "rediss://redis.example:6380/0"
    assert tls.tls is not None
    assert str(tls.tls.ca_file) == "/etc/headrace/tls/ca.crt"
    assert str(tls.tls.key_file) == "/etc/headrace/tls/tls.key"
    sentinel = configuration("external-sentinel", "generator").broker
    assert sentinel.address == "rediss+sentinel://s-0.redis:26379,s-1.redis:26379/main"
    assert sentinel.sentinel is not None
    assert str(sentinel.sentinel.password_file) == "/etc/headrace/redis/sentinel-password"
    cluster = configuration("external-cluster", "learner").broker
    assert (cluster.cluster, cluster.user, cluster.url) == (True, "headrace", "redis://redis.example:6379")
    spec, _ = pod("external-cluster", "learner")
    assert next(v for v in spec["volumes"] if v["name"] == "redis")["secret"]["items"][0]["key"] == "password"
    assert of_kind(combination("external-tls"), "StatefulSet", "-valkey") == []


def test_no_variable_is_there_twice(name: str) -> None:
    for manifest, _, container in containers(combination(name)):
        names = [variable["name"] for variable in container.get("env", ())]
        assert len(names) == len(set(names)), title(manifest)


def test_variables_of_ones_own_win_over_overrides_and_these_over_the_charts() -> None:
    values = {
        "run": RUN.read_text(),
        "overrides": {"broker.user": "mine", "weights.host": "10.1.1.1", "run.dir": "/a"},
        "learner": {"extraEnv": [{"name": "HEADRACE__RUN__DIR", "value": "/b"}]},
    }
    manifests = tuple(parse(text) for text in chart.render(values, "my-run", "rl"))
    (learner,) = of_kind(manifests, "StatefulSet", "-learner")
    environ = {each["name"]: each.get("value") for each in pod_templates(learner)[0]["spec"]["containers"][0]["env"]}
    assert environ["HEADRACE__BROKER__USER"] == '"mine"'
    assert environ["HEADRACE__WEIGHTS__HOST"] == '"10.1.1.1"'
    assert environ["HEADRACE__RUN__DIR"] == "/b"


def test_overrides_win_over_the_file() -> None:
    config = configuration("everything", "learner")
    assert config.model.path == "/models/qwen"
    assert config.learner.groups_per_step == 128
    assert config.staleness.expired_tokens == "drop"


@pytest.mark.parametrize("release", ["123", "true", "1e3", "null"])
def test_release_whose_name_looks_like_another_type_keeps_its_name(release: str) -> None:
    for text in chart.render({"run": RUN.read_text()}, release, "rl"):
        for template in pod_templates(manifest := parse(text)):
            for variable in template["spec"]["containers"][0].get("env", ()):
                if variable["name"] == "HEADRACE__RUN__ID":
                    environ = {"HEADRACE__RUN__ID": variable["value"]}
                    assert settings.load(RUN, environ=environ).run.run_id == release, title(manifest)


# --- generators


@pytest.mark.parametrize("name", sorted(COMBINATIONS))
def test_replicas_are_left_to_the_autoscaler_where_there_is_one(name: str) -> None:
    kind = "LeaderWorkerSet" if name.startswith("multi-host") else "Deployment"
    workload = of_kind(combination(name), kind, "-generator")[0]
    scaled = name in ("everything", "no-crds", "multi-host", "multi-host-apply")
    assert ("replicas" in workload["spec"]) is not scaled


def test_generators_never_surge() -> None:
    spec = of_kind(combination("minimal"), "Deployment", "-generator")[0]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": "25%"}
    group = of_kind(combination("multi-host"), "LeaderWorkerSet")[0]["spec"]
    assert group["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] == 0


def test_scaled_object_follows_the_gauge_with_the_settings_that_were_simulated() -> None:
    spec = of_kind(combination("everything"), "ScaledObject")[0]["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert trigger["metadata"]["threshold"] == "1"
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert trigger["metadata"]["query"] == 'max(headrace_generators_desired{run="gsm8k-7"})'
    assert spec["fallback"]["behavior"] == "currentReplicas"
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 60
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert behavior["scaleDown"]["policies"] == [{"type": "Percent", "value": 25, "periodSeconds": 120}]
    target = {key: spec["scaleTargetRef"][key] for key in ("kind", "name")}
    assert target == {"kind": "Deployment", "name": "my-run-generator"}
    assert of_kind(combination("multi-host"), "ScaledObject")[0]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_autoscaler_of_our_own_may_touch_one_scale_and_nothing_else() -> None:
    for name, group, resource in (
        ("no-crds", "apps", "deployments/scale"),
        ("multi-host-apply", "leaderworkerset.x-k8s.io", "leaderworkersets/scale"),
    ):
        (role,) = of_kind(combination(name), "Role")
        rule = {"apiGroups": [group], "resources": [resource], "resourceNames": ["my-run-generator"]}
        assert role["rules"] == [{**rule, "verbs": ["get", "patch"]}]
        with_token = [
            template["metadata"]["labels"]["app.kubernetes.io/component"]
            for _, template, _ in containers(combination(name))
            if template["spec"]["automountServiceAccountToken"]
        ]
        assert with_token == ["autoscaler"]


def test_accelerators_come_from_the_run_the_values_or_a_claim() -> None:
    assert pod("minimal", "generator")[1]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod("minimal", "learner")[1]["resources"]["limits"]["nvidia.com/gpu"] == 2  # learner.ranks of the file
    assert pod("everything", "learner")[1]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert pod("multi-host", "generator")[1]["resources"]["limits"]["nvidia.com/gpu"] == 8  # 16 over two hosts
    for component, count in (("generator", 2), ("learner", 8)):
        resources = pod("claims", component)[1]["resources"]
        assert resources["claims"] == [{"name": "gpus"}]
        assert "nvidia.com/gpu" not in resources["limits"]
        (claim,) = of_kind(combination("claims"), "ResourceClaimTemplate", f"-{component}")
        assert claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == count
    for _, _, container in containers(combination("cpu")):
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


# --- the learner


def test_learner_is_elastic_and_meets_at_the_coordinator() -> None:
    manifest = of_kind(combination("everything"), "StatefulSet", "-learner")[0]
    environ = environment("everything", "learner")
    assert manifest["spec"]["podManagementPolicy"] == "Parallel"
    names = ("MIN_NODES", "MAX_NODES", "STORE_HOST")
    elastic = {name: environ[f"HEADRACE__LEARNER__ELASTIC__{name}"] for name in names}
    assert elastic == {"MIN_NODES": "1", "MAX_NODES": "4", "STORE_HOST": "my-run-coordinator"}
    assert environ["HEADRACE__LEARNER__RANKS"] == "8"
    # Ranks may use nearly all of the grace period to finish their step and save.
    grace = pod("everything", "learner")[0]["terminationGracePeriodSeconds"]
    assert int(environ["HEADRACE__LEARNER__ELASTIC__GRACE_S"]) == grace - 10 == 590
    assert configuration("everything", "learner").weights.host == "10.0.0.7"
    service = of_kind(combination("everything"), "Service", "-learner")[0]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert manifest["spec"]["serviceName"] == "my-run-learner"


def test_coordinator_is_one_at_a_time() -> None:
    spec = of_kind(combination("minimal"), "Deployment", "-coordinator")[0]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


# --- pods done right


def test_loading_a_model_may_take_half_an_hour() -> None:
    for component in ("generator", "learner"):
        probe = pod("minimal", component)[1]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


def test_probes_ask_what_they_are_for(name: str) -> None:
    for _, template, container in containers(combination(name)):
        component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if component in ("autoscaler", "valkey") or "startupProbe" not in container:  # workers of an engine have none
            continue
        paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
        assert paths == {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}


def test_pods_satisfy_the_restricted_standard(name: str) -> None:
    for _, template, container in containers(combination(name)):
        spec, security = template["spec"], container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])


def test_shared_memory_is_memory(name: str) -> None:
    for component in ("generator", "learner"):
        spec, container = pod(name, component)
        volume = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
        assert volume["emptyDir"]["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_disruption_budgets() -> None:
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(combination("minimal"), "PodDisruptionBudget")
    }
    assert budgets["my-run-generator"]["maxUnavailable"] == "25%"
    assert budgets["my-run-learner"]["maxUnavailable"] == 1


def allowed(name: str, component: str, direction: str) -> list[tuple[Any, int, int]]:
    """(components or namespace labels, first port, last port) of the rules of a component's policy."""
    policy = of_kind(combination(name), "NetworkPolicy", f"-{component}")[0]["spec"]
    found = []
    for rule in policy[direction]:
        for peer in rule.get("from" if direction == "ingress" else "to", [{}]):
            expressions = peer.get("podSelector", {}).get("matchExpressions")
            who = expressions[0]["values"] if expressions else peer.get("namespaceSelector", {}).get("matchLabels")
            found += [(who, port["port"], port.get("endPort", port["port"])) for port in rule["ports"]]
    return found


def test_network_lets_in_whom_it_should() -> None:
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    assert allowed("no-crds", "valkey", "ingress") == [
        (["coordinator", "generator", "learner", "autoscaler"], 6379, 6379)
    ]
    assert allowed("no-crds", "autoscaler", "ingress") == []
    for component in ("generator", "learner"):
        assert allowed("minimal", component, "ingress") == [
            (monitoring, 9400, 9400),
            (["generator", "learner"], 1024, 65535),
        ]
    assert allowed("minimal", "coordinator", "ingress") == [(monitoring, 9400, 9400), (["learner"], 29400, 29400)]


def test_locked_down_run_has_no_way_out() -> None:
    for component in ("coordinator", "generator", "learner"):
        for who, first, _ in allowed("locked-down", component, "egress"):
            assert who is not None or first in (53, 443)
    policy = of_kind(combination("locked-down"), "NetworkPolicy", "-generator")[0]["spec"]
    assert all("to" in rule for rule in policy["egress"])


def test_monitoring_appears_where_the_cluster_has_it() -> None:
    for name, expected in (("no-crds", 0), ("found-crds", 1), ("everything", 1)):
        assert len(of_kind(combination(name), "PodMonitor")) == expected
        assert len(of_kind(combination(name), "PrometheusRule")) == expected
    (rule,) = of_kind(combination("everything"), "PrometheusRule")
    assert 'run="gsm8k-7"' in rule["spec"]["groups"][0]["rules"][0]["expr"]


def test_commands_are_ones_headrace_understands(name: str) -> None:
    """The words of every container's command are parsed by the sub-command's own parser; nothing is started."""
    for manifest, _, container in containers(combination(name)):
        program, *arguments = container["command"]
        if program != "headrace":
            assert program in ("sh", "ray"), title(manifest)
            continue
        point = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["headrace.commands"]
        module, _, attribute = point[arguments[0]].partition(":")
        target = getattr(importlib.import_module(module), attribute)
        single = target if isinstance(target, typer.Typer) else typer.Typer()
        if single is not target:
            single.command()(target)
        typer.main.get_command(single).make_context("headrace", arguments[1:])


def test_store_of_the_learner_is_the_coordinators() -> None:
    name = "HEADRACE__LEARNER__ELASTIC__STORE_PORT"
    port = environment("minimal", "coordinator")[name]
    assert environment("minimal", "learner")[name] == port
    assert {"name": "store", "containerPort": int(port)} in pod("minimal", "coordinator")[1]["ports"]
