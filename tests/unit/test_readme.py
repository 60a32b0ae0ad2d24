"""The examples in README.md and in the page on plans do what these say of them, and the tables of
commands and of jobs name what exists.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from rayrec.cli.group import COMMANDS as SUBCOMMANDS
from tests.unit.documents import ROOT, execute, run
from tests.warm import Warm

README, PLANNER, JOBS, COMMANDS = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/planner.md", "docs/commands.md", "docs/cli.md")
)


def example(page: str, name: str) -> str:
    """The block of a page that has this name."""
    return re.findall(rf"<!-- tested: {name} -->\n```python\n(.*?)```", page, re.DOTALL)[0]


@pytest.mark.xdist_group("warm interpreter")
def test_library_example_learns(tmp_path: Path, warm: Warm):
    printed = run(example(README, "library"), tmp_path, warm)
    losses = [float(line.split()[1]) for line in printed.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def test_planner_example_runs_without_torch_and_prints_what_the_page_shows(tmp_path: Path):
    blocked = "import sys; sys.modules.update(torch=None, numpy=None, ray=None)\n"
    code = blocked + example(PLANNER, "planner")
    report = execute([sys.executable, "-c", code], tmp_path, 60)
    shown = PLANNER.split("```python")[1].split("```")[2]
    assert report.strip() == shown.strip()


def test_every_job_is_in_the_table():
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if "__main__" in path.read_text()}
    assert jobs <= set(re.findall(r"`python -m jobs\.(\w+)`", JOBS))


def test_every_subcommand_is_on_the_page_of_commands():
    named = re.findall(r"^\| `rayrec ([a-z-]+)", COMMANDS, re.MULTILINE)
    assert sorted(named) == sorted(SUBCOMMANDS)


def test_the_table_of_figures_is_that_of_the_newest_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["figures", "--check"])
    assert figures.main() == 0, "run python -m benchmarks.figures"
