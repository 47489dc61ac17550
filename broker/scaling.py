"""Bringing the number of generator pods to the autoscaler's wish where there is no KEDA: `headrace autoscale --apply`.

`Pace` says how fast, in the way of Kubernetes' own horizontal autoscaler; `KubernetesScale` reads and patches the scale
of one workload, over the API server's REST interface and with the pod's own token.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import ConfigError, HeadraceError

Kind = Literal["Deployment", "LeaderWorkerSet"]

_PATHS: dict[str, str] = {
    "Deployment": "apis/apps/v1/namespaces/{}/deployments/{}/scale",
    "LeaderWorkerSet": "apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets/{}/scale",
}
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 10.0

UP_S, DOWN_S = 60.0, 300.0  # windows: up to the least, down to the most that was wanted in them
UP_EACH_S, UP_PODS = 60.0, 4  # at most doubled, or so many more
DOWN_EACH_S, DOWN_SHARE = 120.0, 0.25
TOLERANCE = 0.1


class ScaleError(HeadraceError):
    """The API server did not do what it was asked for."""


@dataclass
class Pace:
    """How many pods there should be now, on the way to a wish: what a HorizontalPodAutoscaler (autoscaling/v2) makes of
    a metric of type AverageValue with target 1 and the behaviour of the chart's ScaledObject."""

    minimum: int
    maximum: int
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def step(self, at: float, pods: int, wish: float) -> int:
        """The number at second `at`, of `pods` that are there (0 pods start at once)."""
        wanted = pods if pods and abs(wish / pods - 1) <= TOLERANCE else math.ceil(wish)
        wanted = min(self.maximum, max(self.minimum, wanted))
        self._wishes.append((at, wanted))
        while self._wishes[0][0] < at - DOWN_S:
            self._wishes.popleft()
        while self._changes and self._changes[0][0] < at - max(UP_EACH_S, DOWN_EACH_S):
            self._changes.popleft()
        up = min(each for since, each in self._wishes if since >= at - UP_S)
        down = max(each for _, each in self._wishes)
        target = pods
        if up > pods:
            before = pods - sum(change for since, change in self._changes if change > 0 and since > at - UP_EACH_S)
            target = max(pods, min(up, max(2 * before, before + UP_PODS)))
        elif down < pods:
            before = pods - sum(change for since, change in self._changes if change < 0 and since > at - DOWN_EACH_S)
            target = min(pods, max(down, math.floor(before * (1 - DOWN_SHARE))))
        if target != pods:
            self._changes.append((at, target - pods))
        return target


@dataclass(frozen=True)
class KubernetesScale:
    """The scale of one workload.

    Args:
        url: of the API server, without a slash at the end.
        token_file: read anew for every request, since the cluster renews it; None: no token.
        ca_file: certificates of the API server; None: those of the system.
    """

    url: str
    namespace: str
    name: str
    kind: Kind = "Deployment"
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of_this_cluster(cls, namespace: str, name: str, kind: Kind) -> KubernetesScale:
        """Of the cluster this pod runs in. ConfigError: it does not run in one, or without an account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (_ACCOUNT / "token").is_file():
            raise ConfigError(
                "--apply needs a pod with a service account: KUBERNETES_SERVICE_HOST or "
                f"{_ACCOUNT / 'token'} is missing; leave --apply out to see the wish only"
            )
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}", namespace, name, kind, _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def read(self) -> int:
        """Pods that are asked for now. ScaleError."""
        return int(self._request("GET", None)["spec"].get("replicas", 0))

    def write(self, replicas: int) -> None:
        """Ask for so many. ScaleError."""
        self._request("PATCH", {"spec": {"replicas": replicas}})

    def _request(self, method: str, body: dict[str, object] | None) -> dict[str, dict[str, int]]:
        headers = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
        if self.token_file is not None:
            headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        data = None if body is None else json.dumps(body).encode()
        path = _PATHS[self.kind].format(self.namespace, self.name)
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        context = ssl.create_default_context(cafile=self.ca_file) if self.url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as reply:
                answer: dict[str, dict[str, int]] = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ScaleError(f"{method} of the scale of {self.kind} {self.name}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise ScaleError(f"{method} of the scale of {self.kind} {self.name}: {error}") from None
        return answer
