"""Names in backticks of the documents, and what they may be: a path, a module, a class and its
member, an option, a target of the Makefile, or a name that the code uses.

A name counts as known when some Python file of the repository uses it as a name or as a whole
string, so that every external name that the code uses is known as well. Names of other programs
that no code mentions stand in `EXTERNAL`. Comments and docstrings make no name known.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.unit.documents import ROOT

FOLDERS = "rayrec", "actors", "jobs", "tests", "benchmarks"
FILES = {"py", "md", "json", "toml", "yaml", "txt", "h", "cpp"}
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)}|torch)(?:\.\w+)+")
IDENTIFIER = re.compile(r"([A-Za-z_]\w+)(\*?)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
MEMBER = re.compile(r"(?<![\w.])([A-Z]\w+)(?:\([^()]*\))?\.([A-Za-z_]\w*)")
PATH = re.compile(r"(?<![\w./:{<-])\.?\w[\w./*-]*(?![\w./>-])")
MAKE = re.compile(r"\bmake ([a-z-]+)")

# names of other programs, and of what they write, that no Python file of the repository mentions
EXTERNAL_OPTIONS = {"--dist", "--generate", "--temp-dir"}
EXTERNAL = {
    *(
        "pip",
        "tomli",
        "ruff",
        "mypy",
        "xdist",
        "loadgroup",
        "boto3",
        "gitignore",
        "gs",
        "auth",
        "torch",
    ),
    *("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "idle_timeout_minutes"),
    *("gpu_ranks", "gpu_ranks_spot", "cpu_readers"),
    *("iam", "PassRole", "ssm", "GetParameters", "AmazonEC2FullAccess"),
    *("shm", "shmem_enabled", "transparent_hugepage", "MADV_COLLAPSE", "MALLOC_ARENA_MAX"),
    *("glibc", "tcache_count", "memmove", "rep", "movsb", "concat_arrays", "index_put_"),
    *("permute_multi_embedding", "day_0", "dry"),
    *("setuptools", "material", "mkdocstrings"),
    *("MLFLOW_TRACKING_URI", "entity", "recall_at_10", "skinny"),
    # TorchRec
    *("clear_storage", "total_num_buckets", "enable_embedding_update", "PartialRowWiseLAMB"),
    *("init_state", "cache_params", "sharding_spec", "input_hash_func"),
    "inference_dispatch_div_train_world_size",
    # what the reader puts there
    *(
        "NAME",
        "WHY",
        "ARGS",
        "dist_",
        "SOURCE",
        "COMMAND",
        "SECTION",
        "KEY",
        "OUT",
        "INDEX_OF_CPU_BUILDS",
        "ACCOUNT",
        "BUCKET",
        "REGISTRY",
        "area",
    ),
}
EXTERNAL_FILES = {"train.txt", "OLD.json", "RUN.toml"}


class Name(NamedTuple):
    """Text in backticks, and where it stands."""

    page: str
    text: str


def names_of(page: str, text: str) -> list[Name]:
    """Everything in backticks of a page, without its blocks of code.

    The names of TorchRec and DynamicEmb, in the first column of a table that says so and in the
    part that lists what rayrec lacks, are left out: nothing here knows them. They count where the
    next column says that rayrec has the same.
    """
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"^## What does not exist$.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL
    )
    lines = []
    foreign = False
    for line in text.splitlines():
        if line.startswith(("| TorchRec |", "| DynamicEmb |")):
            foreign = True
        elif not line.startswith("|"):
            foreign = False
        cells = line.split("|")
        if foreign and not cells[2].strip().startswith("the same"):
            del cells[1]
        lines.append("|".join(cells))
    return [Name(page, found) for found in re.findall(r"`([^`]+)`", "\n".join(lines))]


class Code(NamedTuple):
    """What the Python files of the repository hold, but those for this.

    Attributes:
        names: every name.
        strings: every string constant that is no docstring.
        members: class -> names of its methods, fields and attributes.
        bases: class -> its bases, as they are written.
    """

    names: set[str]
    strings: set[str]
    members: dict[str, set[str]]
    bases: dict[str, set[str]]


@cache
def code() -> Code:
    """Read every file once: half a million nodes take seconds."""
    found = Code(set(), set(), {}, {})
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*.py")):
            if "document_names" not in path.name:
                _gather(ast.parse(path.read_text()), found, ())
    return found


def _gather(node: ast.AST, found: Code, owners: tuple[set[str], ...]) -> None:
    """Add a node and what is below it; `owners` are the members of the classes around it."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            found.strings.add(node.value)
        return
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        own = (node.name,)
    elif isinstance(node, ast.Name):
        own = (node.id,)
    else:
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        own = (node.attr,) if stored else ()  # type: ignore[attr-defined]
    for inside in owners:
        inside.update(own)
    if isinstance(node, ast.ClassDef):
        owners = (*owners, found.members.setdefault(node.name, set()))
        bases = {ast.unparse(base) for base in node.bases}
        found.bases.setdefault(node.name, set()).update(bases)
    is_said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    for value in () if is_said else vars(node).values():
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, ast.AST):
                _gather(part, found, owners)
            elif isinstance(part, str):
                found.names.update(part.split("."))


@cache
def known() -> frozenset[str]:
    """Every name, and every word of a string without spaces."""
    words = set(keyword.kwlist) | set(dir(builtins)) | EXTERNAL | code().names
    for text in code().strings:
        if re.fullmatch(r"[\w.-]+", text):
            words.update(re.findall(r"\w+", text))
    return frozenset(words)


@cache
def options() -> frozenset[str]:
    """Every `--option` that a parser of the repository has, or that other programs take."""
    own = {text for text in code().strings if OPTION.fullmatch(text)}
    return frozenset(own | {f"--no-{text[2:]}" for text in own} | EXTERNAL_OPTIONS)


@cache
def members() -> dict[str, frozenset[str]]:
    """Class -> its methods, fields and attributes, also those of its bases in the repository."""
    found, bases = code().members, code().bases
    for _ in range(4):  # deep enough for the bases of bases
        for name, above in bases.items():
            for base in above & found.keys():
                found[name] |= found[base]
    return {
        name: frozenset(inside)
        for name, inside in found.items()
        if all(base in found or base in {"NamedTuple", "Protocol", "Enum"} for base in bases[name])
    }


@cache
def files() -> frozenset[str]:
    """Every file and folder of the repository, by its path."""
    paths = set()
    for folder, inside, names in os.walk(ROOT):
        above = Path(folder).relative_to(ROOT)
        # .ci is the one hidden folder that is part of the project
        inside[:] = [name for name in inside if name[0] not in "._" or name == ".ci"]
        paths.update(str(above / name) for name in [*inside, *names])
    return frozenset(paths)


def wrong(name: Name) -> list[str]:
    """What a name gets wrong, in words; nothing where all of it exists."""
    text, errors = name.text, list[str]()
    for target in MAKE.findall(text):
        if not re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
            errors.append(f"the Makefile has no target {target}")
    text = MAKE.sub(" ", text)
    for option in OPTION.findall(text):
        if option not in options():
            errors.append(f"no parser has {option}")
    text = OPTION.sub(" ", text)
    for path in PATH.findall(text):
        if _looks_like_a_path(path):
            if not _exists(path):
                errors.append(f"there is no {path}")
            text = text.replace(path, " ")
    for module in MODULE.findall(text):
        if not _imports(module):
            errors.append(f"nothing is {module}")
        text = text.replace(module, " ")
    for owner, member in MEMBER.findall(text):
        if owner in members() and member not in members()[owner]:
            errors.append(f"{owner} has no {member}")
    for word, star in IDENTIFIER.findall(text):
        if word in known() or (star and any(one.startswith(word) for one in known())):
            continue
        errors.append(f"no code has the name {word}{star}")
    return errors


def _looks_like_a_path(text: str) -> bool:
    top, slash, _ = text.partition("/")
    return (bool(slash) and top in {*FOLDERS, "docs", ".ci"}) or text.rpartition(".")[2] in FILES


def _exists(path: str) -> bool:
    """Whether some file has this path, or one that ends with it; a star stands for any text."""
    ending = re.escape(path.rstrip("/")).replace(r"\*", "[^/]*")
    pattern = re.compile(rf"(.*/)?{ending}")
    return path in written() or any(pattern.fullmatch(one) for one in files())


@cache
def written() -> frozenset[str]:
    """Names of files that some program reads or writes, as the code spells them."""
    own = {text for text in code().strings if re.fullmatch(r"[\w/-]+\.\w+", text)}
    return frozenset(own | EXTERNAL_FILES)


def _imports(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(value, attribute) and attribute not in members().get(
                getattr(value, "__name__", ""), ()
            ):
                return False
            value = getattr(value, attribute, None)
        return True
    return False
