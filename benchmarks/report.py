"""Writing down what a benchmark found: a JSON and a Markdown file per run, with hardware, versions and command, and a plot of ratios."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

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
    short = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)|processor|cpu|\d+-core", "", model.lower())).strip("-")
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


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    """The option of `profiles_of`."""
    parser.add_argument("--profile", type=Path, metavar="DIR", help="after its turns profile each of rayrec's systems, into folders of DIR")


def profiles_of(args: argparse.Namespace, case: str) -> Path | None:
    """Folder for the profiles of a case, or None without --profile."""
    return None if args.profile is None else args.profile / re.sub(r"[^a-z0-9]+", "-", case.lower())


def show(name: str, results: dict[str, Any], lines: Sequence[str], label: str | None = None) -> None:
    """Print a table and write it with its results."""
    text = "\n".join(lines)
    print(text)
    print("written:", write(name, results, text, label))


def write(name: str, results: dict[str, Any], table: str, label: str | None = None) -> Path:
    """Write `<label or name>-<hardware>-<date>.{json,md}`; returns the path of the Markdown file.

    Results with a "ratio" of quartiles also become an SVG plot of the ratios by case.
    """
    RESULTS.mkdir(exist_ok=True)
    command = "python -m benchmarks." + name + " " + " ".join(sys.argv[1:])
    about: dict[str, Any] = {"benchmark": name, "hardware": hardware(), "date": date.today().isoformat()}
    about |= {"versions": versions(), "command": command.strip()}
    stem = f"{label or name}-{about['hardware']}-{about['date']}"
    (RESULTS / f"{stem}.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    lines = [f"# {name}", "", f"`{about['command']}` on {about['hardware']}, {about['date']}; "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in versions().items())
    ratios = {case: found["ratio"] for case, found in results.items() if isinstance(found, dict) and isinstance(found.get("ratio"), dict)}
    picture = ""
    if len(ratios) > 1:
        (RESULTS / f"{stem}.svg").write_text(bars(f"{name}: time against the reference, quartiles", ratios))
        picture = f"![ratios]({stem}.svg)\n\n"
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n\n" + picture + table.strip() + "\n")
    return path


def bars(title: str, ratios: Mapping[str, Mapping[str, float]]) -> str:
    """An SVG of one bar per case, as long as its median ratio on a logarithmic axis, with a whisker over the quartiles and a line at 1."""
    low = min(0.5, *(q["p25"] for q in ratios.values())) * 0.9
    high = max(2.0, *(q["p75"] for q in ratios.values())) * 1.1

    def x(ratio: float) -> float:
        return 330 + 420 * math.log(max(ratio, 1e-9) / low) / math.log(high / low)

    drawn = [f'<text x="10" y="18" font-weight="bold">{escape(title)}</text>']
    for i, (case, q) in enumerate(ratios.items()):
        y = 30 + 20 * i
        left, right = sorted((x(1.0), x(q["median"])))
        drawn.append(f'<text x="320" y="{y + 13}" text-anchor="end">{escape(case)}</text>')
        drawn.append(f'<rect x="{left:.1f}" y="{y + 3}" width="{right - left:.1f}" height="13" fill="#7a9cc6"/>')
        drawn.append(f'<line x1="{x(q["p25"]):.1f}" y1="{y + 9.5}" x2="{x(q["p75"]):.1f}" y2="{y + 9.5}" stroke="#223" stroke-width="2"/>')
        drawn.append(f'<text x="760" y="{y + 13}">{q["median"]:.2f}x</text>')
    height = 40 + 20 * len(ratios)
    drawn.append(f'<line x1="{x(1.0):.1f}" y1="28" x2="{x(1.0):.1f}" y2="{height - 8}" stroke="#223"/>')
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{height}" {style}>\n' + "\n".join(drawn) + "\n</svg>\n"
