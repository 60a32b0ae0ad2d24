"""Links between the documents lead somewhere, and every page is reached: from the README by links,
and on the site by its navigation.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.documents import PAGES, ROOT

LINK = re.compile(r"\]\(([^)#:\s]*)#?([^):\s]*)\)")
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
# pages of the site that the build makes from files outside docs/
MADE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}


def headings(page: Path) -> set[str]:
    """What a link may name after the sign #: the headings of a page, in small letters."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def wrong_links(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for target, part in LINK.findall(text):
        linked = (page.parent / target).resolve() if target else page
        if not linked.is_file() or (part and part not in headings(linked)):
            wrong.append(f"{page.name} links to {target}{'#' * bool(part)}{part}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path):
    assert not wrong_links(page, page.read_text())


@pytest.mark.parametrize("link", ["(nowhere.md)", "(README.md#nowhere)", "(#nowhere)"])
def test_a_wrong_link_would_be_found(link: str):
    assert len(wrong_links(ROOT / "README.md", f"see [this]{link} and [that](LICENSE)")) == 1


def test_every_page_is_reached_from_the_readme_by_links():
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.is_file():
            reached.add(page)
            targets = LINK.findall(page.read_text())
            waiting += [(page.parent / target).resolve() for target, _ in targets if target]
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in reached]
    assert not lost, f"README.md does not lead to {lost}"


def test_the_navigation_of_the_site_names_every_page_once():
    named = re.findall(r"([\w/-]+\.md)$", NAVIGATION, re.MULTILINE)
    files = {MADE.get(name, f"docs/{name}") for name in named}
    pages = {str(page.relative_to(ROOT)) for page in PAGES}
    assert len(files) == len(named)
    # the build puts the examples' page into the navigation; that of the tests is for contributors
    assert files == pages - {"examples/README.md", "tests/README.md"}
