"""Writing down what a benchmark found: one JSON and one Markdown file per run, with hardware, versions and command."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

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


def write(name: str, results: dict[str, Any], table: str, label: str | None = None) -> Path:
    """Write `<label or name>-<hardware>-<date>.{json,md}`; returns the path of the Markdown file."""
    RESULTS.mkdir(exist_ok=True)
    command = "python -m benchmarks." + name + " " + " ".join(sys.argv[1:])
    about: dict[str, Any] = {"benchmark": name, "hardware": hardware(), "date": date.today().isoformat()}
    about |= {"versions": versions(), "command": command.strip()}
    stem = f"{label or name}-{about['hardware']}-{about['date']}"
    (RESULTS / f"{stem}.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    lines = [f"# {name}", "", f"`{about['command']}` on {about['hardware']}, {about['date']}; "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in versions().items())
    path = RESULTS / f"{stem}.md"
    path.write_text("\n".join(lines) + "\n\n" + table.strip() + "\n")
    return path
