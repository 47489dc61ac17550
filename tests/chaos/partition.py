"""Network namespaces for `--partition`: the generators and the learner live on hosts of their own, and lose the server.

The harness runs in a namespace of its own (`unshare -n`), and Valkey with it; each host is the namespace of a zygote,
joined to a bridge by a veth pair. A partition takes a host's port of the bridge down, so that packets vanish without a
word: no connection is reset. Namespaces end with their processes; nothing is left on the machine. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.chaos.zygote import Zygote

SERVER_ADDRESS = "10.231.0.1"
_INSIDE = "HEADRACE_CHAOS_NETNS"


def enter() -> int | None:
    """Run this program again in a network namespace of its own; its exit code. None: we are there already."""
    if os.environ.get(_INSIDE):
        return None
    command = ["unshare", "-n", sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()} (network namespaces need root)")


class Network:
    """The bridge with the server's address and a host for each zygote."""

    def __init__(self, root: Path, hosts: tuple[str, ...]) -> None:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("addr", "add", f"{SERVER_ADDRESS}/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        self.zygotes = {host: self._host(root, host, 2 + number) for number, host in enumerate(hosts)}

    def _host(self, root: Path, host: str, number: int) -> Zygote:
        zygote = Zygote(root / f"{host}.log", ("unshare", "-n"))
        _ip("link", "add", f"port-{host}", "type", "veth", "peer", "name", "eth0", "netns", str(zygote.pid))
        _ip("link", "set", f"port-{host}", "master", "bridge", "up")
        inside = ("nsenter", "-t", str(zygote.pid), "-n", "ip")
        for arguments in (("addr", "add", f"10.231.0.{number}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                          ("link", "set", "lo", "up")):  # fmt: skip
            subprocess.run([*inside, *arguments], check=True)
        return zygote

    def cut(self, host: str) -> None:
        _ip("link", "set", f"port-{host}", "down")

    def heal(self, host: str) -> None:
        _ip("link", "set", f"port-{host}", "up")

    def close(self) -> None:
        for zygote in self.zygotes.values():
            zygote.close()
