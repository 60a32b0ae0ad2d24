"""The `rayrec` command as a whole: help, what is imported, completion, mistakes in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rayrec.cli.base import Command
from rayrec.cli.group import COMMANDS, COMPLETE
from rayrec.cli.main import main
from rayrec.errors import ConfigError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "pyarrow", "ray", "numpy", "fbgemm_gpu", "rich")
SHELL_ASKS = {"COMP_WORDS": "", "COMP_CWORD": "1", COMPLETE: "bash_complete"}


def imported_by(*argv: str) -> set[str]:
    """The top-level modules, and those of rayrec, that a command line imports in a new process."""
    script = f"""
import sys
from rayrec.cli.main import main
code = main({list(argv)!r})
print("\\n" + " ".join(m for m in sys.modules if "." not in m or m.startswith("rayrec.")))
raise SystemExit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_no_subcommand_and_nothing_heavy() -> None:
    modules = imported_by("--help")
    assert "click" in modules and not modules & set(HEAVY)
    own = {f"rayrec.cli.{name.replace('-', '_')}" for name in COMMANDS}
    assert not modules & own and "rayrec.planner" not in modules


def test_the_help_of_a_subcommand_imports_it_alone() -> None:
    modules = imported_by("train", "--help")
    assert "rayrec.cli.train" in modules and "rayrec.cli.plan" not in modules
    assert not modules & set(HEAVY)


@pytest.fixture(scope="module")
def reach_torch() -> set[str]:
    """The modules that commands need and that import torch, of which none has any yet."""
    needs = sorted({command_of(name).needs for name in COMMANDS} - {""})
    script = f"""
import sys
from importlib import import_module
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("no torch")
sys.meta_path.insert(0, Refuse())
for needed in {needs!r}:
    for name in [name for name in sys.modules if name.startswith("rayrec")]:
        del sys.modules[name]
    try:
        import_module(needed)
    except ImportError as error:
        if str(error) == "no torch":
            print(needed)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_needs_imports_torch(name: str, reach_torch: set[str]) -> None:
    needs = command_of(name).needs
    assert needs in reach_torch or (not needs and name in ("serve", "plan", "completion"))


def command_of(name: str) -> Command:
    command = import_module(f"rayrec.cli.{name.replace('-', '_')}").command
    assert isinstance(command, Command)
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    command = command_of(name)
    assert len(command.examples) > 1
    assert f"Usage: rayrec {name} " in shown and "--debug" in shown
    assert all(line in shown for line in command.examples)
    assert any(f"rayrec {name} " in line for line in command.examples)
    for option in command.params:
        assert getattr(option, "help", "") != "" and option.name


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, text in COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in lines)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "Missing command."),
        ("evalute", "No such command 'evalute'."),
        ("--nothing", "No such option '--nothing'."),
        ("train --steps 5", "No such option '--steps'. The keys of a run are set by --set"),
        ("serve --prt 1 x", "No such option '--prt'."),
        ("train a.toml b.toml", "Got unexpected extra argument (b.toml)"),
        ("train --data", "Option '--data' requires an argument."),
        ("train --data --timing", "Option '--data' requires an argument."),
        ("train --timing=3", "Option '--timing' does not take a value."),
        ("evaluate", "Missing argument 'CHECKPOINT'."),
        ("predict x", "Missing option '--data'."),
        ("predict x --data y --out z --keys a,,b", "Invalid value for '--keys': 'a,,b' must be"),
        ("evaluate x --data y --ranks 0", "Invalid value for '--ranks': 0 is not in"),
        ("smoke --plan row_wise", "No such option '--plan'."),
        ("completion", "Missing argument 'SHELL'."),
        ("completion tcsh", "Invalid value for 'SHELL': 'tcsh' is not one of 'bash'"),
        (
            "plan --schema s --topology h100 --optimizer x",
            "Invalid value for '--optimizer': 'x' is",
        ),
        ("calibrate --ranks two", "Invalid value for '--ranks'"),
        ("plan --ranks 1000000000", "Invalid value for '--ranks'"),
        ("plan --batch 0", "Invalid value for '--batch'"),
        ("plan --reserve 1.0", "Invalid value for '--reserve'"),
        ("plan --input-hidden 2", "Invalid value for '--input-hidden'"),
    ],
)
def test_a_mistake_is_one_line(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    known = line.split()[:1] if line.split()[:1] and line.split()[0] in COMMANDS else []
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    assert error.endswith(f"(see {' '.join(['rayrec', *known])} --help)\n")


def test_debug_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["--debug", "train"], ["train", "--debug"]):
        assert main(line) == 2
        error = capsys.readouterr().err
        assert "Traceback" in error and ConfigError.__name__ in error
        assert error.splitlines()[-1].startswith("error: say what to train")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_the_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETE}={shell}_complete" in script and "rayrec" in script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rayrec ma", {"plain,make-data"}),
        ("rayrec plan --qcomms-", {"plain,--qcomms-forward", "plain,--qcomms-backward"}),
        ("rayrec plan --optimizer ad", {"plain,adagrad", "plain,adam"}),
        ("rayrec train --result x", {"file,x"}),
        ("rayrec completion f", {"plain,fish"}),
    ],
)
def test_a_shell_is_offered_what_fits(
    words: str, offered: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asks = {**SHELL_ASKS, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    for name, value in asks.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert set(capsys.readouterr().out.split()) == offered


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    command = tmp_path / "rayrec"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rayrec.cli.main "$@"\n')
    command.chmod(0o755)
    ask = 'COMP_WORDS=(rayrec cal); COMP_CWORD=1; _rayrec_completion rayrec; echo "${COMPREPLY[@]}"'
    script = f'eval "$(rayrec completion bash)"; {ask}'
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["calibrate"], done.stderr
