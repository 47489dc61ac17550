"""Security lint of the rendered manifests and the Dockerfiles: no finding without an explanation, and none of these
without a finding.

    python -m tests.k8s.lint FOLDER-OF-CHECKOV-AND-HADOLINT
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from k8s import chart
from tests.k8s.dockerfiles import ROOT
from tests.k8s.manifests import COMBINATIONS, values_of

IMAGES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "k8s" / "images").glob("Dockerfile.*"))]
WORK = ("my-run-coordinator", "my-run-generator", "my-run-learner", "my-run-valkey", "my-run-autoscaler")

# Check: the resources it may find, and why it stays.
EXPLAINED: dict[str, tuple[tuple[str, ...], str]] = {
    "CKV_K8S_11": (
        ("my-run-generator", "my-run-learner"),
        "no CPU limit by default: a throttled engine or collective holds up the fleet, and such nodes are not shared",
    ),
    "CKV_K8S_15": (
        WORK,
        "IfNotPresent: tags are versions (the chart refuses latest), and pods restart while the registry is away",
    ),
    "CKV_K8S_43": (WORK, "the digest is that of the user's registry: image.digest and valkey.image.digest"),
    "CKV_K8S_38": (("my-run-autoscaler",), "it patches the scale of one workload, and nothing else may get a token"),
    "CKV_K8S_8": (("my-run-autoscaler",), "it serves nothing, and ends with an error when it cannot work"),
    "CKV_K8S_9": (("my-run-autoscaler",), "it serves nothing"),
}


def scan(checkov: Path, framework: str, *arguments: str) -> list[Any]:
    """checkov's findings. AssertionError: it could not read a file, or checked nothing."""
    command = [str(checkov), *arguments, "--framework", framework, "--skip-download", "--compact", "-o", "json"]
    # It exits with 1 where it finds something.
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(result.stdout)
    summary = report["summary"]
    assert summary["parsing_errors"] == 0 and summary["passed"] > 50, summary
    print(f"checkov {framework}: {summary['passed']} passed, {summary['failed']} failed")
    findings: list[Any] = report["results"]["failed_checks"]
    return findings


def main(tools: Path) -> int:
    mistakes: list[str] = []
    found: defaultdict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in COMBINATIONS.items():
            text = "---\n".join(chart.render(values_of(path), "my-run", "rl"))
            (Path(folder) / f"{name}.yaml").write_text(text)
        for each in scan(tools / "checkov", "kubernetes", "-d", folder):
            resource = each["resource"].rsplit(".", 1)[-1]
            found[each["check_id"]].add(resource)
            if resource not in EXPLAINED.get(each["check_id"], ((), ""))[0]:
                mistakes.append(f"{each['check_id']} {each['check_name']}: {each['resource']} in {each['file_path']}")
    mistakes += [f"{check} is explained and finds nothing any more" for check in EXPLAINED if check not in found]
    for each in scan(tools / "checkov", "dockerfile", "-f", *IMAGES):
        mistakes.append(f"{each['check_id']} {each['check_name']}: {each['file_path']}")
    linted = subprocess.run([str(tools / "hadolint"), *IMAGES], cwd=ROOT, capture_output=True, text=True, check=False)
    mistakes += linted.stdout.splitlines()
    for check, resources in sorted(found.items()):
        if check in EXPLAINED:
            print(f"explained: {check} ({', '.join(sorted(resources))}): {EXPLAINED[check][1]}")
    print("\n".join(mistakes) or f"hadolint: {len(IMAGES)} files, no finding\nnothing unexplained")
    return int(bool(mistakes) or linted.returncode != 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
