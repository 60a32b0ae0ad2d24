"""What mkdocs does beside its own work when it builds the site (see mkdocs.yml).

Pages that lie outside docs/ are added: README is the first page, CONTRIBUTING, the examples and the
reference follow. Every file of the repository that a page links to gets a page as well, so that no
link leaves the site. On each page, links between files of the repository become links between pages
of the site, and the comments that say how a block is tested are left out.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# pages of the site that are made from a file outside docs/
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
# pages that are the only one of their tab, so that there is nothing to list beside them
ALONE = {"index.md", "walkthrough.md"}
# only links: pictures begin with an exclamation mark and are moved alike
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
PICTURE = ".png"
MARK = re.compile(
    r"^ *<!-- (?:tested|walk|own machine|not run|figures|end of figures)\b.*?-->\n", re.MULTILINE
)
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".toml": "toml", ".json": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the parts of the navigation that follow from folders and packages."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    filled = {
        "Examples": ["examples/index.md", *(f"examples/{path.stem}.md" for path in examples())],
        "Reference": [
            "reference/index.md",
            *({package: f"reference/{package}.md"} for package in reference.PACKAGES),
        ],
    }
    assert config.nav is not None
    for part in config.nav:
        for title in part:
            part[title] = filled.get(title, part[title])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    made = {site: (ROOT / source).read_text() for source, site in MOVED.items()}
    made["examples/index.md"] = (ROOT / "examples/README.md").read_text()
    for path in examples():
        made[f"examples/{path.stem}.md"] = example_page(path)
    pages = reference.entries()
    made["reference/index.md"] = reference.index(pages)
    for package, names in pages.items():
        made[f"reference/{package}.md"] = reference.page(package, names)
    sources = {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked = {site_path(s): source_page(s) for s in linked_sources({**sources, **made})}
    made.update(linked)
    for picture in linked_sources(linked):
        if picture.endswith(PICTURE):
            content = (ROOT / picture).read_bytes()
            files.append(File.generated(config, site_path(picture), content=content))
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave the marks of tests out, and turn links between files into links between pages."""
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    text = LINK.sub(lambda link: _moved_link(link, here), MARK.sub("", markdown))
    # a page is no file to its reader
    return re.sub(r"\[([\w-]+)\.md\]\(", r"[\1](", text)


def examples() -> list[Path]:
    """The programs of examples/, in the order of their names."""
    return sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__")


def example_page(path: Path) -> str:
    """An example: its docstring as text, and its code."""
    _, docstring, code = path.read_text().split('"""', 2)
    title, _, text = docstring.partition("\n")
    return f"# {title.rstrip('.')}\n{text}\n```python\n{code.strip()}\n```\n"


def linked_sources(pages: dict[str, str]) -> list[str]:
    """Files of the repository that pages link to and that are no pages by themselves."""
    found = set()
    for here, text in pages.items():
        for link in LINK.finditer(text):
            source = repository_path(here, link[2])
            if site_path(source).startswith("sources/") and (ROOT / source).is_file():
                found.add(source)
    return sorted(found)


def source_page(source: str) -> str:
    """A file of the repository as a page."""
    path = ROOT / source
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {source}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```\n"


def repository_path(here: str, target: str) -> str:
    """The file that a link of a page names, by its path in the repository.

    Args:
        here: the page by its path in the site.
        target: the link as it stands on the page.
    """
    origins = {site: source for source, site in MOVED.items()}
    if here.startswith("sources/"):
        origin = here.removeprefix("sources/")
    elif here.startswith("examples/"):
        origin = here
    else:
        origin = origins.get(here, f"docs/{here}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def site_path(source: str) -> str:
    """The page of the site, or the file, that shows a file of the repository."""
    if source in MOVED:
        return MOVED[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source in ("examples", "examples/README.md"):
        return "examples/index.md"
    if source.startswith("examples/"):
        return f"{source.removesuffix('.py')}.md"
    if source.endswith(PICTURE):
        return f"sources/{source}"
    return f"sources/{source.removesuffix('.md')}.md"


def _moved_link(link: re.Match[str], here: str) -> str:
    opening, target, rest = link.groups()
    if here.startswith("reference/"):
        return link[0]
    to = site_path(repository_path(here, target))
    return f"{opening}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{rest}"


def on_post_page(output: str, **_: Any) -> str:
    """Nothing of a page may come from another host."""
    remote = re.search(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?:)?//", output)
    assert remote is None, f"a page would load {remote and remote[0]!r}"
    return output
