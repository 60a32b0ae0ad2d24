"""Every name in backticks of the documents exists, and every program that they start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.document_names import Name, names_of, wrong
from tests.unit.documents import BLOCKS, PAGES, ROOT

# they only lead to other pages
WITHOUT_NAMES = {ROOT / "docs/howto/index.md", ROOT / "examples/README.md"}
# one worker process reads all code, which takes seconds
pytestmark = pytest.mark.xdist_group("document names")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_backticks_exists(page: Path):
    names = names_of(page.name, page.read_text())
    assert names or page in WITHOUT_NAMES
    errors = [f"`{name.text}`: {error}" for name in names for error in wrong(name)]
    assert not errors, "\n" + "\n".join(errors)


def test_every_module_that_a_block_starts_exists():
    commands = [block for block in BLOCKS if block.language == "sh"]
    modules = {
        name for block in commands for name in re.findall(r"python3? -m ([\w.]+)", block.code)
    }
    assert len(modules) > 5
    theirs = {"pip", "zipfile", "venv"}
    errors = [error for name in modules - theirs for error in wrong(Name("blocks", name))]
    assert not errors


@pytest.mark.parametrize(
    "text, error",
    [
        ("rayrec/distributed/nowhere.py", "there is no rayrec/distributed/nowhere.py"),
        ("nowhere.py", "there is no nowhere.py"),
        ("rayrec/nowhere", "there is no rayrec/nowhere"),
        ("tests/unit/*_nowhere.py", "there is no tests/unit/*_nowhere.py"),
        ("rayrec.layout.no_such_function", "nothing is rayrec.layout.no_such_function"),
        ("python -m jobs.nowhere", "nothing is jobs.nowhere"),
        ("torch.optim.Nothing", "nothing is torch.optim.Nothing"),
        ("Topology.no_such_method(2)", "Topology has no no_such_method"),
        ("RunConfig(no_such_field=2)", "no code has the name no_such_field"),
        ("NoSuchClass", "no code has the name NoSuchClass"),
        ("no_such_function", "no code has the name no_such_function"),
        ("zzz_such_*", "no code has the name zzz_such_*"),
        ("--no-such-option", "no parser has --no-such-option"),
        ("make no-such-target", "the Makefile has no target no-such-target"),
    ],
)
def test_a_wrong_name_is_found(text: str, error: str):
    page = f"# A page\n\nWords, `Driver`, and `{text}`.\n\n```python\nno_matter = 1\n```\n"
    driver, made_up = names_of("made-up.md", page)
    assert not wrong(driver)
    assert error in wrong(made_up)


def test_only_the_names_of_torchrec_are_passed_over():
    page = """# Names
| TorchRec | rayrec |
|---|---|
| `OfTorchRec` | `OfRayrec` |
| `Both` | the same, in `Room` |

| other | rayrec |
|---|---|
| `Other` | `Another` |

## What does not exist

`Nothing`

## After it

`Something`
"""
    names = [name.text for name in names_of("made-up.md", page)]
    assert names == ["OfRayrec", "Both", "Room", "Other", "Another", "Something"]
