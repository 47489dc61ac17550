"""What a kubelet does with the rendered pods: volumes, variables, the container's command, probes, the end.

Commands, arguments, paths, ports and probes are those of the manifests, unchanged: `tests.k8s.sandbox` gives each pod
an address and a root of its own, so that nothing has to be rewritten. What stands for something else:

- images: this environment, with the packages of this working tree laid over it, at /opt/headrace, and the variables of
  `k8s/images/Dockerfile.cpu`; for Valkey the server of this environment and, since that comes without `valkey-cli`, one
  that knows the options the probes use and refuses others. So that an image holds all this is not shown here.
- DNS: /etc/hosts, written when a pod starts. A Service has to name the port its container listens on.
- claims: folders, made empty; the caller fills those that the release only refers to.
- the clock of probes: `until` asks twice a second; its patience is the probe's own in seconds, for readiness a minute.

Not there: what schedules (`_UNMAPPED`), limits of CPU and memory, seccomp, network policies, restarts. A field of a
pod, container, volume or probe that is neither mapped nor named here is an error, so that nothing is left out
unnoticed; preStop hooks and initContainers, for instance, which the chart does not have.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from broker.server import find_binary
from tests.k8s.dockerfiles import read
from tests.k8s.manifests import Manifest, of_kind, pod_templates, title
from tests.k8s.sandbox import Container, Image, Mount, Namespaces, Node, connect

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "broker", "generator", "learner", "k8s")
_UNMAPPED = {
    "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets", "priorityClassName",
    "affinity", "nodeSelector", "tolerations", "topologySpreadConstraints",
}  # fmt: skip
_POD = {"securityContext", "shareProcessNamespace", "terminationGracePeriodSeconds", "containers", "volumes"}
_IDENTITY = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"}
_RIGHTS = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_PROBES = {"startup": "startupProbe", "readiness": "readinessProbe", "liveness": "livenessProbe"}
_CONTAINER = {"name", "image", "command", "args", "env", "ports", "volumeMounts", *_PROBES.values()} | {
    "imagePullPolicy", "resources", "securityContext",
}  # fmt: skip
_CLI = """#!/opt/valkey/python
import argparse, sys
parser = argparse.ArgumentParser()
for option in ("--no-auth-warning", "--user", "--pass"):
    parser.add_argument(option, **({"action": "store_true"} if option == "--no-auth-warning" else {}))
parser.add_argument("command", nargs="+")
words = parser.parse_args()
sys.path.append("/opt/valkey/site")
import redis
client = redis.Redis(username=words.user, password=getattr(words, "pass"))
print("PONG" if client.execute_command(*words.command) is True else "something else")
"""


class PodFailed(AssertionError):
    """A container ended, or a probe gave no answer in time; with the end of the container's output."""


@dataclass(frozen=True)
class Answer:
    """Of a probe."""

    ok: bool
    text: str


def _only(what: str, found: Mapping[str, object], known: set[str]) -> None:
    assert found.keys() <= known, f"{what}: nobody here knows {sorted(found.keys() - known)}"


class Pod:
    """One pod, not started yet.

    Attributes:
        name, address: as its processes see them.
        labels: of its template.
        grace_s: seconds that it has between SIGTERM and SIGKILL.
    """

    def __init__(self, cluster: Cluster, owner: Manifest, number: int) -> None:
        template = pod_templates(owner)[0]
        self._cluster, self._spec = cluster, template["spec"]
        kind, name = owner["kind"], owner["metadata"]["name"]
        self.name = f"{name}-{number}" if kind == "StatefulSet" else f"{name}-7c9f8d6b5-{number:05}"
        self.labels: dict[str, str] = template["metadata"]["labels"]
        _only(title(owner), self._spec, _POD | _UNMAPPED)
        (self._wanted,) = self._spec["containers"]
        _only(f"container of {title(owner)}", self._wanted, _CONTAINER)
        assert self._wanted["securityContext"] == _RIGHTS, "another security context than the sandbox's"
        self.grace_s = float(self._spec["terminationGracePeriodSeconds"])
        self.folder = cluster.folder / "pods" / self.name
        self.log = self.folder / "log"
        self._volumes = {volume["name"]: volume for volume in self._spec["volumes"]}
        for claim in owner["spec"].get("volumeClaimTemplates", ()):
            volume = claim["metadata"]["name"]
            self._volumes[volume] = {"persistentVolumeClaim": {"claimName": f"{volume}-{self.name}"}}
        self._shared = bool(self._spec.get("shareProcessNamespace"))
        processes = ["--pid", "--fork", "--kill-child"] if self._shared else []
        self._sandbox = Namespaces("--net", "--uts", "--ipc", *processes)
        self.address = connect(cluster.node, self._sandbox, self.name, len(cluster.pods) + 2)
        self._container: Container | None = None

    # --- starting

    def start(self) -> None:
        """Run the container's command; it goes on beside us."""
        self.folder.mkdir(parents=True)
        identity = self._spec["securityContext"]
        _only(f"securityContext of {self.name}", identity, _IDENTITY)
        user, group = identity["runAsUser"], identity["runAsGroup"]
        assert identity["fsGroup"] == group
        etc = {
            "hosts": self._cluster.hosts(self),
            "passwd": f"root:x:0:0::/:/bin/false\nheadrace:x:{user}:{group}::/tmp:/bin/false\n",
            "group": f"root:x:0:\nheadrace:x:{group}:\n",
            "nsswitch.conf": "hosts: files\n",
        }
        mounts = [self._mount(each, group) for each in self._wanted["volumeMounts"]]
        variables = self._environment()
        self._container = Container(
            self._sandbox, self.folder, self._cluster.image(self._wanted["image"]), mounts, variables, etc, user, group,
            read_only=True, shared=self._shared,
        )  # fmt: skip
        words = [*self._wanted["command"], *self._wanted.get("args", ())]
        self._container.start(self.expanded(words, variables), self.log)

    def _environment(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for variable in self._wanted.get("env", ()):
            _only(f"variable {variable['name']}", variable, {"name", "value", "valueFrom"})
            if "valueFrom" in variable:
                (source,) = variable["valueFrom"].items()
                known = {"metadata.name": self.name, "status.podIP": self.address}
                assert source[0] == "fieldRef", variable
                found[variable["name"]] = known[source[1]["fieldPath"]]
            else:
                (found[variable["name"]],) = self.expanded([variable.get("value", "")], found)
        return found

    @staticmethod
    def expanded(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """`words` with $(NAME) replaced as Kubernetes does it: unknown names stay, $$ is a dollar."""
        pattern = re.compile(r"\$\$|\$\(([^)]+)\)")
        return [pattern.sub(lambda m: variables.get(m[1], m[0]) if m[1] else "$", word) for word in words]

    def _mount(self, wanted: Manifest, group: int) -> Mount:
        _only(f"mount of {self.name}", wanted, {"name", "mountPath", "subPath", "readOnly"})
        volume = self._volumes[wanted["name"]]
        _only(f"volume of {self.name}", volume, {"name", "configMap", "secret", "emptyDir", "persistentVolumeClaim"})
        path, folder = wanted["mountPath"], self.folder / "volumes" / wanted["name"]
        read_only = wanted.get("readOnly", False)
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]
            _only("claim", claim, {"claimName", "readOnly"})
            read_only = read_only or claim.get("readOnly", False)
            return Mount(path, self._cluster.claim(claim["claimName"], group), read_only)
        if "emptyDir" in volume:
            _only("emptyDir", volume["emptyDir"], {"medium", "sizeLimit"})
            if volume["emptyDir"].get("medium") == "Memory":
                return Mount(path, None, size=volume["emptyDir"]["sizeLimit"].removesuffix("i").lower())
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o777)
            return Mount(path, folder)
        files, mode = self._files(volume)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
            (folder / name).chmod(mode)
            os.chown(folder / name, 0, group)
        return Mount(path, folder / wanted["subPath"] if "subPath" in wanted else folder, True)

    def _files(self, volume: Manifest) -> tuple[dict[str, str], int]:
        """Of a ConfigMap or a Secret, and their mode."""
        kind, source = ("ConfigMap", volume["configMap"]) if "configMap" in volume else ("Secret", volume["secret"])
        _only(kind, source, {"name", "secretName", "items", "defaultMode"})
        name = source.get("name") or source["secretName"]
        (found,) = [each for each in of_kind(self._cluster.manifests, kind) if each["metadata"]["name"] == name]
        data = found["data"] if kind == "ConfigMap" else found["stringData"]
        items = source.get("items", [{"key": key, "path": key} for key in data])
        return {item["path"]: data[item["key"]] for item in items}, source.get("defaultMode", 0o644)

    # --- asking

    def probe(self, kind: str) -> Answer:
        """One answer of the probe `startup`, `readiness` or `liveness`, asked as the kubelet asks."""
        wanted = self._wanted[_PROBES[kind]]
        _only(f"{kind} of {self.name}", wanted,
              {"httpGet", "exec", "tcpSocket", "periodSeconds", "timeoutSeconds", "failureThreshold"})  # fmt: skip
        timeout_s = float(wanted.get("timeoutSeconds", 1))
        if "exec" in wanted:
            assert self._container is not None
            try:
                done = self._container.run(wanted["exec"]["command"], timeout_s)
            except subprocess.TimeoutExpired:
                return Answer(False, f"no answer in {timeout_s} s")
            return Answer(done.returncode == 0, done.stdout + done.stderr)
        if "tcpSocket" in wanted:
            return self._cluster.node.call(lambda: _connects(self.address, self._port(wanted["tcpSocket"]), timeout_s))
        _only("httpGet", wanted["httpGet"], {"path", "port"})
        return self.get(wanted["httpGet"]["path"], self._port(wanted["httpGet"]), timeout_s)

    def get(self, path: str, port: int | None = None, timeout_s: float = 10.0) -> Answer:
        """What the pod answers from the node; by default at its port `metrics`."""
        number = port or self._port({"port": "metrics"})
        return self._cluster.node.call(lambda: _get(self.address, number, path, timeout_s))

    def until(self, kind: str, ok: bool = True, text: str = "") -> Answer:
        """Ask until the answer is `ok` and holds `text`. PodFailed: not within the probe's own patience."""
        wanted = self._wanted[_PROBES[kind]]
        patience_s = float(wanted["periodSeconds"] * wanted.get("failureThreshold", 3))
        deadline = time.monotonic() + max(patience_s, 60.0 if kind == "readiness" else 0.0)
        while True:
            answer = self.probe(kind)
            if answer.ok is ok and text in answer.text:
                return answer
            self.lives()
            if time.monotonic() > deadline:
                raise PodFailed(f"{self.name}: {kind} is {answer}, not {ok} {text!r}, in time:\n{self.tail()}")
            time.sleep(0.5)

    def _port(self, action: Manifest) -> int:
        if isinstance(action["port"], int):
            return action["port"]
        return next(int(each["containerPort"]) for each in self._wanted["ports"] if each["name"] == action["port"])

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self._wanted["ports"]}

    def lives(self) -> None:
        """PodFailed: its container has ended."""
        code = self.code()
        if code is not None:
            raise PodFailed(f"{self.name} ended with {code}:\n{self.tail()}")

    def code(self) -> int | None:
        assert self._container is not None and self._container.process is not None
        return self._container.process.poll()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    # --- ending

    def delete(self) -> None:
        """SIGTERM, as when the pod is deleted; a preStop hook would be a field that nobody here knows."""
        assert self._container is not None
        os.kill(self._container.pid, signal.SIGTERM)

    def ended(self, within_s: float | None = None) -> int:
        """Its exit code. PodFailed: it did not end within its grace period, or `within_s`."""
        assert self._container is not None and self._container.process is not None
        try:
            return self._container.process.wait(within_s or self.grace_s)
        except subprocess.TimeoutExpired:
            raise PodFailed(f"{self.name} goes on after {within_s or self.grace_s} s:\n{self.tail()}") from None

    def close(self) -> None:
        if self._container is not None and self._container.process is not None and self.code() is None:
            self._container.process.kill()  # its own process goes with it, or with the sandbox
            self._container.process.wait()
        self._sandbox.close()


class Cluster:
    """The pods of a release on one node.

    Args:
        manifests: of the release, and the Secrets and ConfigMaps that it only refers to.
        folder: for roots, volumes and logs.
    """

    def __init__(self, manifests: tuple[Manifest, ...], folder: Path) -> None:
        self.manifests, self.folder = manifests, folder
        self._images = {name: make(folder / name) for name, make in (("headrace", _headrace), ("valkey", _valkey))}
        self.node = Node()
        self.pods: list[Pod] = []
        try:
            for owner in (*of_kind(manifests, "StatefulSet"), *of_kind(manifests, "Deployment")):
                for number in range(owner["spec"]["replicas"]):
                    self.pods.append(Pod(self, owner, number))
        except BaseException:
            self.close()
            raise

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.labels["app.kubernetes.io/component"] == component]

    def image(self, reference: str) -> Image:
        return self._images[reference.rsplit("/", 1)[-1].partition(":")[0]]

    def claim(self, name: str, group: int) -> Path:
        """The folder of a claim, which its group may write."""
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, group)
        folder.chmod(0o2775)
        return folder

    def hosts(self, pod: Pod) -> str:
        """What names mean in `pod`: its own, and those of Services."""
        lines = ["127.0.0.1 localhost", f"{pod.address} {pod.name}"]
        for service in of_kind(self.manifests, "Service"):
            for chosen in self.pods:
                if service["spec"]["selector"].items() <= chosen.labels.items():
                    for port in service["spec"]["ports"]:
                        assert chosen.ports[port["targetPort"]] == port["port"], title(service)
                    lines.append(f"{chosen.address} {service['metadata']['name']}")
        return "".join(f"{line}\n" for line in lines)

    def close(self) -> None:
        for pod in self.pods:
            pod.close()
        self.node.close()


def _get(address: str, port: int, path: str, timeout_s: float) -> Answer:
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Answer(200 <= response.status < 400, response.read().decode())
    except OSError as error:
        return Answer(False, str(error))
    finally:
        connection.close()


def _connects(address: str, port: int, timeout_s: float) -> Answer:
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        return Answer(False, str(error))
    return Answer(True, "")


# --- images


def _interpreter() -> tuple[str, ...]:
    """Where Python itself is, if not in /usr."""
    return () if Path(sys.base_prefix).is_relative_to("/usr") else (sys.base_prefix,)


def _headrace(folder: Path) -> Image:
    """This environment with this working tree's packages, as the Dockerfile's steps would install them."""
    place, packages = "/opt/headrace", folder / Path(os.__file__).relative_to(sys.base_prefix).parent / "site-packages"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, packages / name)
    program = Path(sys.executable).parent / "headrace"
    (folder / "bin").mkdir()
    (folder / "bin/headrace").write_text(re.sub(r"\A#!.*", f"#!{place}/bin/python", program.read_text()))
    (folder / "bin/headrace").chmod(0o755)
    folder.chmod(0o755)
    texts = [step.text for step in read(ROOT / "k8s/images/Dockerfile.cpu") if step.name == "ENV" and step.stage == 1]
    variables = dict(word.split("=", 1) for text in texts for word in text.split())
    variables["PATH"] = variables["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    return Image(variables, (folder, Path(sys.prefix).resolve()), place, _interpreter())


def _valkey(folder: Path) -> Image:
    folder.mkdir()
    shutil.copy(find_binary(), folder / "valkey-server")
    (folder / "valkey-cli").write_text(_CLI)
    (folder / "valkey-cli").chmod(0o755)
    (folder / "python").symlink_to(Path(sys.executable).resolve())
    redis = find_spec("redis")
    assert redis is not None and redis.origin is not None
    shutil.copytree(Path(redis.origin).parent, folder / "site/redis")
    folder.chmod(0o755)
    below = folder.with_name("nothing")  # an overlay has two layers at least
    below.mkdir()
    return Image({"PATH": "/opt/valkey:/usr/bin:/bin"}, (folder, below), "/opt/valkey", _interpreter())
