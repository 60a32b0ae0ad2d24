"""The examples in README.md do what it says of them, and its tables name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures
from tests.unit.documents import ROOT, run

README = (ROOT / "README.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- tested: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))


def test_library_example_learns(tmp_path):
    losses = [float(line.split()[1]) for line in run(EXAMPLES["library"], tmp_path).splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


def test_planner_example_runs_without_torch_and_prints_a_plan(tmp_path):
    blocked = "import sys; sys.modules.update(torch=None, numpy=None, ray=None)\n"
    report = run(blocked + EXAMPLES["planner"], tmp_path)
    shown = README.split("```python")[3].split("```")[2]
    for text in (report, shown):
        assert text.strip().startswith(
            "Plan: 6 tables on 4 ranks (2 hosts x 2 cpu), 2048 rows per rank, rowwise_adagrad"
        )
        assert {line.split()[0] for line in text.splitlines()[-6:] if line} == {
            "user",
            "item",
            "query",
            "page",
            "city",
            "hour",
        }


def test_every_job_is_in_the_table():
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if "__main__" in path.read_text()}
    assert jobs <= set(re.findall(r"`python -m jobs\.(\w+)`", README))


def parts_of(page: Path) -> set[str]:
    """What a link may name after the sign #: the headings of a page, in small letters."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target, part in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert linked.is_file(), f"{page.name} links to {target}"
            assert not part or part in parts_of(linked), f"{page.name} links to {target}#{part}"


def test_the_table_of_figures_is_that_of_the_newest_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["figures", "--check"])
    assert figures.main() == 0, "run python -m benchmarks.figures"
