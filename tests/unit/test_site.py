"""The documentation site holds every public package, builds without a warning, and asks no other
host for anything.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.unit.documents import ROOT

# public names of their own that other packages export, or that only the runtime uses
INTERNAL = {"rayrec", "rayrec.spec.optimizers", "rayrec.distributed.ways"}


def reference() -> ModuleType:
    """The module that makes the pages of the reference."""
    path = ROOT / "docs/site/reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


class Html(HTMLParser):
    """What a page of the site links to, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.anchors.add(value)
            elif name == "href" and tag == "a":
                self.links.append(value)
            elif name in ("src", "href"):
                self.loads.append(value)


class Built(NamedTuple):
    """The site: its folder, and its pages by path."""

    folder: Path
    pages: dict[Path, Html]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    files = sorted(folder.rglob("*.html"))
    return Built(folder, {path: Html(path.read_text()) for path in files})


def test_every_public_package_is_in_the_reference():
    packages = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "rayrec").rglob("*.py")
        if re.search(r"^__all__\b", path.read_text(), re.MULTILINE)
    }
    assert packages - INTERNAL == set(reference().PACKAGES) - {"rayrec.errors"}


def test_every_public_name_of_rayrec_is_described_once():
    import rayrec

    described = [
        entry.name
        for names in reference().entries().values()
        for entry in names
        if entry.is_home and entry.name in rayrec.__all__
    ]
    assert set(described) == set(rayrec.__all__)


@pytest.mark.slow
def test_the_site_has_all_pages(site: Built):
    names = {str(path.relative_to(site.folder)) for path in site.pages}
    assert {"index.html", "walkthrough.html", "howto/own-loop.html", "contributing.html"} <= names
    assert {f"reference/{package}.html" for package in reference().PACKAGES} <= names
    assert {f"examples/{path.stem}.html" for path in (ROOT / "examples").glob("*.py")} <= names


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Built):
    wrong = []
    for path, page in site.pages.items():
        # its links begin at the server's root
        if path.name == "404.html":
            continue
        for link in page.links:
            target, _, part = link.partition("#")
            if ":" in target:
                continue
            linked = (path.parent / target).resolve() if target else path
            known = site.pages.get(linked)
            missing = known is not None and part and part not in known.anchors
            if not linked.exists() or missing:
                wrong.append(f"{path.relative_to(site.folder)}: {link}")
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site: Built):
    remote = {
        load
        for page in site.pages.values()
        for load in page.loads
        if re.match(r"(https?:)?//", load)
    }
    styles = [path.read_text() for path in site.folder.rglob("*.css")]
    assert not remote
    assert not any(re.search(r"url\([\"']?(https?:)?//", style) for style in styles)


@pytest.mark.slow
def test_the_reference_reads_the_parts_of_docstrings(site: Built):
    page = (site.folder / "reference/rayrec.driver.html").read_text()
    assert "<p>Raises:" not in page and "<p>Returns:" not in page
    assert 'id="rayrec.driver.driver.Driver.fit"' in page
