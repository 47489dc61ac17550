"""docs/start.md, command by command, as a newcomer would type it: one shell, a fresh copy of the tracked files.

The rule. Blocks `console` hold commands after `$ `, and below each what it prints. Blocks that open with a comment
naming a file are that file. A command must end with 0, or with N where its line ends with `# ends with N`. What it
prints to standard output must be the lines shown, in that order, and nothing else: `...` is any number of lines or
the rest of a line, a number stands for any number, and runs of spaces count as one. Standard error is not compared.

Left out: `make venv`, which takes minutes and the network. The environment that runs this test takes its place.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.processes import await_end, family, kill_family, send

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start.md"
LEFT_OUT = ("make venv",)
PATIENCE_S = 1800.0  # 5 minutes where nothing else runs
ENDS = "headrace-newcomer-ends"  # what the shell prints after a command, with its exit code
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.:]\d+)*")  # times and addresses included


@dataclass
class Command:
    line: str
    code: int = 0
    shown: list[str] = field(default_factory=list)


def commands(page: str) -> list[Command]:
    """The page's commands in order; blocks that are files become commands that write them."""
    found: list[Command] = []
    for kind, text in _BLOCK.findall(page):
        name = re.match(r"# (\w+\.\w+)\n", text)
        if name is not None:
            found.append(Command(f"cat > {name.group(1)} <<'END OF FILE'\n{text}END OF FILE"))
        elif kind == "console":
            for line in text.splitlines():
                if line.startswith("$ "):
                    code = re.search(r"# ends with (\d+)", line)
                    found.append(Command(line[2:], int(code.group(1)) if code else 0))
                else:
                    found[-1].shown.append(line)
        else:
            raise AssertionError(f"a block {kind!r} that is neither commands nor a file:\n{text}")
    return [each for each in found if each.line not in LEFT_OUT]


def pattern(line: str) -> str:
    """Expression for the output that a line shown stands for; see the rule."""
    if line.strip() == "...":
        return r"(?:.*\n)*"
    words = (re.escape(_NUMBER.sub("\0", word)).replace("\0", r"\d+(?:[.:]\d+)*") for word in line.split())
    shape = r"[ \t]+".join(words).removesuffix(r"[ \t]+\.\.\.")
    return rf"[ \t]*{shape}{'.*' if line.endswith('...') else '[ ]*'}\n"


def missing(shown: list[str], printed: list[str]) -> str | None:
    """The first line shown that was not printed where it should be, or what was printed and not shown."""
    text, wanted = "".join(f"{line}\n" for line in printed), ""
    for line in shown:
        wanted += pattern(line)
        if re.match(wanted, text) is None:
            return line
    return None if re.fullmatch(wanted, text) else "the end, after what is shown"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the tracked files, as they are now."""
    folder = tmp_path / "headrace"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not: removed and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


class Shell:
    """One bash with job control, as on a terminal: without it jobs in the background are deaf to Ctrl-C's signal."""

    def __init__(self, folder: Path, errors: Path) -> None:
        self._errors = errors
        # PYTHONPATH: the copy is what is run, wherever the environment's own installation points to.
        environ = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        environ.pop("HEADRACE_REDIS_URL", None)
        self.process = subprocess.Popen(
            ["bash", "--norc"], cwd=folder, env=environ, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors.open("w"),
        )  # fmt: skip
        self.run("set -m")

    def run(self, line: str) -> tuple[list[str], int]:
        """What a command prints to standard output, and its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\necho {ENDS} $?\n")
        self.process.stdin.flush()
        printed: list[str] = []
        for text in self.process.stdout:
            if text.startswith(ENDS):
                return printed, int(text.split()[1])
            printed.append(text.rstrip("\n"))
        raise AssertionError(f"the shell ended in {line!r}; printed: {printed}; {self._errors.read_text()[-3000:]}")

    def close(self) -> None:
        """Nothing may survive: what is left in the session is told to stop in order, then killed."""
        left = family("no mark/", [self.process.pid])
        send(left, signal.SIGINT)
        await_end(left, 20)
        kill_family("no mark/", [self.process.pid])
        self.process.wait(5)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(PATIENCE_S)
def test_every_command_of_the_start_page_does_what_it_shows(clone: Path, tmp_path: Path) -> None:
    shell = Shell(clone, tmp_path / "errors")
    different: list[str] = []
    try:
        for command in commands(PAGE.read_text()):
            printed, code = shell.run(command.line)
            told = f"$ {command.line}\n" + "\n".join(printed)
            assert code == command.code, f"ended with {code}\n{told}\n{(tmp_path / 'errors').read_text()[-3000:]}"
            if (wanted := missing(command.shown, printed)) is not None:
                different.append(f"not where it should be: {wanted}\n{told}\n")
    finally:
        shell.close()
    assert different == [], "\n".join(different)


def test_rule_tells_output_that_differs() -> None:
    shown = ["run 1: started ...", "...", "step 6/6  reward 0.4 ...", "balanced"]
    printed = ["run 22: started at 12:30", "step 1/6 reward 0.3 x", "step 6/6 reward 0.75 y", "balanced"]
    assert missing(shown, printed) is None
    assert missing(shown, printed[:-1]) == "balanced"
    assert missing(shown, [*printed[:-1], "lost", "balanced"]) == "balanced"
    assert missing(shown[:1], printed) == missing([], ["nobody announced me"]) == "the end, after what is shown"
    assert missing(["..."], ["anything"]) is missing(["a  1 "], ["  a 2.5"]) is None
    assert missing(["(a 1)"], ["(a b)"]) == "(a 1)"
