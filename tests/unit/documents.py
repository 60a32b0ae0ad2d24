"""Code blocks of the documents, and how they are run.

A comment above a block says how it is tested:

    <!-- tested: NAME -->        runs alone, in a folder of its own;
                                 JSON is parsed as what NAME says
    <!-- walk: file PATH -->     is written to PATH, in the folder of its page's walk
    <!-- walk: python PATH -->   is written to PATH there, and run
    <!-- walk: shell -->         runs there, line by line, until a line fails
    <!-- own machine: NAME -->   runs in a network and a process space of its own,
                                 as on another machine
    <!-- not run: WHY -->        shell commands only, and says why
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.warm import Warm

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_MARK = r"(?:^ *<!-- ([a-z ]+): ?((?:(?!-->).)*?) -->\n)?"
_BLOCK = re.compile(_MARK + r"^( *)```(\w*)\n(.*?)^\3```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of a page: `how` and `what` are those of the comment above it."""

    page: Path
    how: str
    what: str
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.stem}-{self.what or self.code.split(maxsplit=1)[0]}"


def blocks() -> list[Block]:
    """All blocks of all pages, in order."""
    found = []
    for page in PAGES:
        for how, what, indent, language, code in _BLOCK.findall(page.read_text()):
            lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
            found.append(Block(page, how, what, language, "".join(lines)))
    return found


BLOCKS = blocks()


def environment(folder: Path) -> dict[str, str]:
    """The variables of a program of a document: rayrec can be imported from any folder, HOME is a
    folder of the test.
    """
    variables = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables.pop("RAY_ADDRESS", None)
    return variables


def execute(command: list[str], folder: Path, timeout_s: float) -> str:
    """What a command prints; its failure is the test's."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run(
    program: str | Path, folder: Path, warm: Warm, *arguments: str, timeout_s: float = 120
) -> str:
    """What a Python program prints, of which torch was imported before; its failure is the test's.

    Args:
        program: its code, or its path.
        folder: where it runs.
    """
    if isinstance(program, str):
        (folder / "program.py").write_text(program)
        program = folder / "program.py"
    return _warmly({"program": str(program)}, arguments, folder, warm, timeout_s)


def _warmly(
    named: dict[str, str], arguments: Sequence[str], folder: Path, warm: Warm, timeout_s: float
) -> str:
    printed, errors = folder / "program.out", folder / "program.err"
    request = {
        **named,
        "cwd": str(folder),
        "argv": arguments,
        "env": environment(folder),
        "stdout": str(printed),
        "stderr": str(errors),
        "bound_s": timeout_s,
        "file_bytes": None,
    }
    for path in (printed, errors):
        path.write_text("")
    code, _ = warm.run(request)
    assert code == 0, f"{code}\n{printed.read_text()}\n{errors.read_text()}"
    return printed.read_text()


def walk(page: Path, folder: Path, warm: Warm, timeout_s: float = 120) -> list[str]:
    """Do the walk of a page; what each shell block, and each program, printed."""
    printed = []
    for block in (b for b in BLOCKS if b.page == page and b.how == "walk"):
        kind, _, name = block.what.partition(" ")
        if kind == "shell":
            printed.append(_shell(block.code, folder, warm, timeout_s))
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block.code)
        if kind == "python":
            printed.append(run(folder / name, folder, warm, timeout_s=timeout_s))
    return printed


_OF_THE_SHELL = re.compile(r"[$|&;<>*`]")


def _shell(code: str, folder: Path, warm: Warm, timeout_s: float) -> str:
    """What the lines of a block print. Modules run warm; what needs a shell is given to bash."""
    printed = ""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["rayrec"]:
            words[:1] = ["python", "-m", "rayrec.cli.main"]
        if words[:2] == ["python", "-m"] and not _OF_THE_SHELL.search(line):
            printed += _warmly({"module": words[2]}, words[3:], folder, warm, timeout_s)
        elif words:
            printed += execute(["bash", "-ec", line], folder, timeout_s)
    return printed
