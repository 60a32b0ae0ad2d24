"""Writing down what a benchmark found: a JSON and a Markdown file per run, with hardware, versions
and command, and a plot of ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.plots import draw_bars

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    """A short name of this machine's processor and number of cores, usable in a file name."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1]
                break
    except OSError:
        pass
    short = re.sub(
        r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|processor|cpu|\d+-core", "", model.lower())
    ).strip("-")
    return f"{short}-{os.cpu_count()}cores"


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "ray", "pyarrow", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark, whose help is what its file says of it."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    """The option of `profiles_of`."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="after its turns profile each of rayrec's systems, into folders of DIR",
    )


def profiles_of(args: argparse.Namespace, case: str) -> Path | None:
    """Folder for the profiles of a case, or None without --profile."""
    return None if args.profile is None else args.profile / re.sub(r"[^a-z0-9]+", "-", case.lower())


def show(
    name: str, results: dict[str, Any], lines: Sequence[str], label: str | None = None
) -> None:
    """Print a table and write it with its results."""
    text = "\n".join(lines)
    print(text)
    print("written:", write(name, results, text, label))


def write(name: str, results: dict[str, Any], table: str, label: str | None = None) -> Path:
    """Write `<label or name>-<hardware>-<date>.{json,md}`; returns the path of the Markdown file.

    Results with a "ratio" of quartiles also become a plot of the ratios by case, a PNG, where
    matplotlib is installed.
    """
    RESULTS.mkdir(exist_ok=True)
    command = "python -m benchmarks." + name + " " + " ".join(sys.argv[1:])
    about: dict[str, Any] = {
        "benchmark": name,
        "hardware": hardware(),
        "date": date.today().isoformat(),
    }
    about |= {"versions": versions(), "command": command.strip()}
    stem = f"{label or name}-{about['hardware']}-{about['date']}"
    (RESULTS / f"{stem}.json").write_text(
        json.dumps({**about, "results": results}, indent=1) + "\n"
    )
    lines = [f"# {name}", "", f"`{about['command']}` on {about['hardware']}, {about['date']}; "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in versions().items())
    ratios = {
        case: found["ratio"]
        for case, found in results.items()
        if isinstance(found, dict) and isinstance(found.get("ratio"), dict)
    }
    picture = ""
    if len(ratios) > 1:
        try:
            draw_bars(
                RESULTS / f"{stem}.png", f"{name}: time against the reference, quartiles", ratios
            )
            picture = f"![ratios]({stem}.png)\n\n"
        except ImportError as error:
            print(f"no plot ({error}); pip install matplotlib draws one")
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n\n" + picture + table.strip() + "\n")
    return path
