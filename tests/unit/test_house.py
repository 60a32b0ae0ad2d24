"""House rules that a tool can check: size of files, opening docstrings, words that do not belong
here, public names that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rayrec
from tests.unit.documents import PAGES

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
MAX_COLUMNS = 100
OPENING = re.compile(r'\s*\Z|(#.*\n|\s)*r?"""\s*[^\s"]')
WIDE_PAGES = {"log.md"}  # written before lines had a limit
PRODUCT = [
    path for top in ("rayrec", "actors", "jobs") for path in sorted((ROOT / top).rglob("*.py"))
]
PYTHON = PRODUCT + [
    path
    for top in ("tests", "benchmarks", "examples", "docs")
    for path in sorted((ROOT / top).rglob("*.py"))
]
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ""}

# written in pieces, so that this file does not hold them
REGISTRIES = [
    "pypi" + ".org",
    "pypi.python" + ".org",
    "pythonhosted" + ".org",
    "download.pytorch" + ".org",
    "npmjs" + ".org",
    "proxy.golang" + ".org",
    "crates" + ".io",
    "docker" + ".io",
    "ghcr" + ".io",
    "quay" + ".io",
]
HOMES = "/(?:home|Users)/(?!ray/)[a-z]+"
ROOTS = "(?<![\\w.~])/ro" + "ot/" + "|(?<![\\w.])/wo" + "rk/(?:main|shared)"
FORBIDDEN = {
    "a package registry's host": "|".join(re.escape(host) for host in REGISTRIES),
    "a switch that hides code from coverage": "pragma: no" + " cover",
    "a path of somebody's machine": f"{HOMES}|{ROOTS}",
}


def offences(text: str) -> list[str]:
    """Lines of a text that hold a forbidden word, with what it is."""
    lines = enumerate(text.splitlines(), 1)
    return [
        f"{number}: {what}: {line.strip()}"
        for number, line in lines
        for what, words in FORBIDDEN.items()
        if re.search(words, line)
    ]


def texts() -> list[Path]:
    """Text files under version control or about to be, or all files below the root where there is
    no git.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if (ROOT / ".git").exists()
        else None
    )
    if listed is not None and listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if ".venv" not in str(path)]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def test_a_file_is_short_enough_to_read():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PRODUCT}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert len(lines) > 50
    assert not long, f"over {MAX_LINES} lines, split where the idea changes: {long}"


def wide_lines(page: str) -> list[int]:
    """Numbers of the lines of prose in a page that are too long; tables and code are no prose."""
    wide = []
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("|") and len(line) > MAX_COLUMNS:
            wide.append(number)
    return wide


def test_a_line_of_a_page_is_short_enough_to_read():
    wide = {
        page.name: wide_lines(page.read_text()) for page in PAGES if page.name not in WIDE_PAGES
    }
    assert not any(wide.values()), f"over {MAX_COLUMNS} characters: {wide}"


def test_a_wide_line_of_a_page_would_be_found():
    wide = "a" * (MAX_COLUMNS + 1)
    assert wide_lines(f"# Page\n{wide}\n|{wide}|\n```\n{wide}\n```\n{wide}\n") == [2, 7]


def test_every_file_opens_by_saying_what_it_does():
    silent = [str(path.relative_to(ROOT)) for path in PYTHON if not OPENING.match(path.read_text())]
    assert not silent, f"no docstring: {silent}"


def test_no_text_holds_what_does_not_belong_here():
    found = [
        f"{path.relative_to(ROOT)}:{offence}"
        for path in texts()
        for offence in offences(path.read_text(errors="replace"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "see pypi" + ".org/project/x",
        "x = 1  # pragma: no" + " cover",
        "cd /ho" + "me/ann/x",
        "open('/ro" + "ot/a')",
    ],
)
def test_what_does_not_belong_here_would_be_found(line):
    assert offences(f"first line\n{line}\n")[0].startswith("2: ")


def test_what_tests_share_is_in_no_test_file():
    """A test file may be moved, cut or marked slow without a look at others."""
    imports = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in PYTHON
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) (\S+\.)?(test_\w+|conftest)\b", line)
    ]
    assert not imports, "\n" + "\n".join(imports)


@pytest.mark.parametrize("name", rayrec.__all__)
def test_every_public_name_exists_and_is_documented(name):
    value = getattr(rayrec, name)
    assert value.__name__ == name
    assert value.__doc__


def test_the_version_is_that_of_the_package():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert rayrec.__version__ == stated


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Drivers"):
        _ = rayrec.Drivers


def test_importing_rayrec_loads_nothing_heavy():
    heavy = "torch", "numpy", "ray", "pyarrow", "fbgemm_gpu"
    code = f"import rayrec, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
