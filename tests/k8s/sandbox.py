"""What a container runtime does, from Linux namespaces alone: an address, a process tree and a file system of its own.

A pod's sandbox holds its network (a veth pair to the node's bridge), its host name and, where the pod shares it, its
process namespace, whose process 1 does nothing but reap. A container is a process in there with a root of its own: a
read-only one of this machine's /usr and of what stands for the image, on which the volumes are mounted at the very
paths of the manifest. It runs as the user the manifest says, without capabilities and without a way to new ones.

Nothing touches the machine's own network or mounts. Everything ends with this process: the sandboxes wait on a pipe,
and containers die with their parent. Needs root, `unshare`, `nsenter`, `setpriv` and `ip` (util-linux, iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "chroot")
SUBNET = "10.244.0"
_NEWNET, _PDEATHSIG = 0x40000000, 1
_PAUSE = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
_DEVICES = ("null", "zero", "full", "random", "urandom")


def missing() -> str:
    """Why there can be no sandbox on this machine; an empty string: there can."""
    if os.geteuid() != 0:
        return "namespaces with users of their own need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"no {', '.join(absent)} on this machine" if absent else ""


def _with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")


class Namespaces:
    """A process that holds namespaces open, as a pod's pause container does."""

    def __init__(self, *flags: str) -> None:
        command = ["unshare", *flags, sys.executable, "-S", "-c", _PAUSE]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=_with_parent)
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise RuntimeError(f"{shlex.join(command)} ended with {self._holder.wait()}")
        self.pid = _child(self._holder.pid) if "--fork" in flags else self._holder.pid

    def enter(self, *command: str) -> None:
        _run("nsenter", "-t", str(self.pid), "--net", "--uts", *command)

    def close(self) -> None:
        self._holder.communicate()


class Node(Namespaces):
    """The machine of the cluster: a bridge that its pods are connected to, and from which probes come."""

    def __init__(self) -> None:
        super().__init__("--net", "--uts")
        for words in ("link add pods type bridge", f"addr add {SUBNET}.1/24 dev pods", "link set pods up"):
            self.enter("ip", *words.split())
        self._inside = ThreadPoolExecutor(8, initializer=self._move)

    def _move(self) -> None:
        """This thread's sockets are the node's from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, function: Callable[[], T]) -> T:
        """Its result, called where the node's network is this thread's."""
        return self._inside.submit(function).result()

    def close(self) -> None:
        self._inside.shutdown()
        super().close()


@dataclass(frozen=True)
class Image:
    """What stands for a container image.

    Attributes:
        variables: of its environment.
        layers: folders that are laid over each other at `place`, the first one on top.
        binds: further paths of this machine that are there under the same name.
    """

    variables: Mapping[str, str]
    layers: tuple[Path, ...]
    place: str
    binds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mount:
    """`source` at `path`: a file or folder of this machine, or None for memory of `size`."""

    path: str
    source: Path | None
    read_only: bool = False
    size: str = "64m"


@dataclass
class Container:
    """A container's file system and identity; `start` runs its command.

    Args:
        sandbox: of its pod.
        folder: for its root.
        shared: whether it lives in the pod's process namespace; else its command is process 1.
    """

    sandbox: Namespaces
    folder: Path
    image: Image
    mounts: Sequence[Mount]
    variables: Mapping[str, str]
    etc: Mapping[str, str]
    user: int
    group: int
    read_only: bool
    shared: bool
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    pid: int = field(default=0, init=False)  # of the container's own process, seen from outside

    def start(self, command: Sequence[str], log: Path) -> None:
        root = self.folder / "root"
        root.mkdir()
        script, made = self.folder / "start.sh", self.folder / "made"
        last = [f": > {made}", f"exec chroot {root} {self._as_user(command)}", ""]
        script.write_text("\n".join(["set -eu", *self._root(root), *last]))
        spaces = ["--net", "--uts", "--ipc", *(["--pid"] if self.shared else [])]
        own = ["--mount", *([] if self.shared else ["--pid", "--fork", "--kill-child"])]
        entry = ["nsenter", "-t", str(self.sandbox.pid), *spaces, "--", "unshare", *own, "--", "sh", str(script)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                entry, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=_with_parent
            )
        while not made.exists():
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"{script} ended with {code}: {log.read_text(errors='replace')}")
            time.sleep(0.01)
        self.pid = _child(self.process.pid)

    def run(self, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command beside the container's own, as `kubectl exec` does."""
        where = ["nsenter", "-t", str(self.pid), "--mount", "--net", "--uts", "--ipc", "--pid", "--root", "--wd", "--"]
        words = [*where, *shlex.split(self._as_user(command))]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)

    def _as_user(self, command: Sequence[str]) -> str:
        ids = [f"--reuid={self.user}", f"--regid={self.group}", f"--groups={self.group}"]
        # Another user's process forgets what it was to be sent at its parent's end.
        rights = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--pdeathsig=KILL"]
        variables = {**self.image.variables, **self.variables}
        environ = ["env", "-i", "--chdir=/tmp", *(f"{name}={value}" for name, value in variables.items())]
        return shlex.join(["/usr/bin/setpriv", *ids, *rights, *environ, *command])

    def _root(self, root: Path) -> list[str]:
        """The lines that make the root."""
        lines = [f"mount -t tmpfs -o mode=755 root {root}", f"cd {root}", "mkdir -m 755 proc sys dev etc opt"]
        lines.append("mkdir -m 1777 tmp")
        for name in _SYSTEM:
            host = Path("/") / name
            if host.is_symlink():
                lines.append(f"ln -s {shlex.quote(os.readlink(host))} {name}")
            elif host.is_dir():
                lines += _bind(str(host), str(host), True)
        for path in (*self.image.binds, "/etc/ld.so.cache", "/etc/alternatives"):
            if Path(path).exists():
                lines += _bind(path, path, True)
        for name, text in self.etc.items():
            lines.append(f"printf %s {shlex.quote(text)} > etc/{name}")
        layers = ":".join(map(str, self.image.layers))
        lines += [f"mkdir -p .{self.image.place}", f"mount -t overlay -o lowerdir={layers} image .{self.image.place}"]
        lines += ["mount -t proc proc proc", "mount -t sysfs -o ro sys sys", "mount -t tmpfs -o mode=755 dev dev"]
        for name in _DEVICES:
            lines += _bind(f"/dev/{name}", f"/dev/{name}", False)
        lines.append("ln -s /proc/self/fd dev/fd")
        paths = [mount.path for mount in self.mounts]
        default = [] if "/dev/shm" in paths else [Mount("/dev/shm", None)]
        for mount in sorted([*self.mounts, *default], key=lambda mount: mount.path):
            if mount.source is None:
                memory = f"mount -t tmpfs -o mode=1777,size={mount.size} memory .{mount.path}"
                lines += [f"mkdir -p .{mount.path}", memory]
            else:
                lines += _bind(str(mount.source), mount.path, mount.read_only)
        return [*lines, "mount -o remount,bind,ro ." if self.read_only else "", "cd /"]


def _bind(source: str, path: str, read_only: bool) -> list[str]:
    target = shlex.quote(f".{path}")
    made = f"mkdir -p {target}" if Path(source).is_dir() else f"mkdir -p $(dirname {target}); : > {target}"
    return [made, f"mount -o bind{',ro' if read_only else ''} {shlex.quote(source)} {target}"]


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if len(children) != 1:
        raise RuntimeError(f"process {pid} has {len(children)} children, expected one")
    return int(children[0])


def connect(node: Node, pod: Namespaces, name: str, number: int) -> str:
    """Give the pod an address on the node's bridge; returns it."""
    address, port = f"{SUBNET}.{number}", f"pod{number}"
    words = f"link add {port} type veth peer name eth0 netns {pod.pid}"
    node.enter("ip", *words.split())
    node.enter("ip", *f"link set {port} master pods up".split())
    for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
        pod.enter("ip", *words.split())
    pod.enter("hostname", name)
    return address
