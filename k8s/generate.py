"""Writes what the chart and the Kustomize base take from elsewhere, so that neither can fall behind.

    python -m k8s.generate

- `headrace/files/users.acl`: the users of a run's own Valkey, from `broker.acl`;
- `headrace/files/dashboards/*.json`: Grafana's dashboards, from `k8s.dashboards`;
- `base/*.yaml`: the chart's manifests with default values, less what Kustomize does in its own way: the namespace, the
  ConfigMap of the run (whose name carries a hash instead of the pods' checksum), and Helm's own labels.

Tests compare the files with `files()`, and what `kubectl kustomize` makes of the base with the chart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from broker.acl import ROLES, rules, user_name
from k8s import chart, dashboards

HERE = Path(__file__).parent
BASE = HERE / "base"
FILES = HERE / "headrace" / "files"
NAME = "headrace"


def users() -> str:
    """Lines of an ACL file; %RUN% stands for the run's id, PASSWORD-OF-role at a line's end for a password."""
    lines = ["user default off", "user headrace-probe reset -@all +ping on nopass"]
    lines += [f"user {user_name(role)} {' '.join(rules('%RUN%', role))} on PASSWORD-OF-{role}" for role in ROLES]
    # For people: backups, rotation, looking into things.
    lines.append("user headrace-admin reset +@all ~* &* on PASSWORD-OF-admin")
    return "\n".join(lines) + "\n"


def base() -> Iterator[tuple[str, str]]:
    """(file name, content) of the base's resources."""
    values, _ = chart.run_values(BASE / "run.yaml")
    found: dict[str, list[str]] = {}
    for text in chart.render(values, NAME, "default"):
        document = yaml.safe_load(text)
        if document["kind"] == "ConfigMap" and document["metadata"]["name"] == f"{NAME}-run":
            continue  # kustomization.yaml makes it of run.yaml
        component = document["metadata"]["labels"]["app.kubernetes.io/component"]
        file = "network" if document["kind"] == "NetworkPolicy" else component.replace("run", "shared")
        found.setdefault(file, []).append(_for_kustomize(text))
    for file, texts in sorted(found.items()):
        yield f"{file}.yaml", "# Written by k8s/generate.py from the chart.\n" + "---\n".join(texts)


def files() -> dict[Path, str]:
    """Everything this script writes."""
    return {
        FILES / "users.acl": users(),
        **{FILES / "dashboards" / f"{name}.json": dashboards.board(name) for name in dashboards.BOARDS},
        **{BASE / name: text for name, text in base()},
    }


def _for_kustomize(text: str) -> str:
    text = re.sub(r"^  namespace: default\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *helm\.sh/chart: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *annotations:\n *# A changed file.*\n *checksum/run: .*\n", "", text, flags=re.MULTILINE)
    text = text.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kustomize")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).replace("\n\n", "\n")


if __name__ == "__main__":
    # The base holds the users, so they come first.
    (FILES / "users.acl").write_text(users(), encoding="utf-8")
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
