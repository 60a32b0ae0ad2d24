"""All benchmarks one after the other, each in a process of its own with settings that take about
twelve minutes in all on 2 cores.

    python -m benchmarks [--only step dlrm] [--skip planner]

Each prints its table and writes its files to `benchmarks/results/`; one that fails does not stop
the others, and the exit code is 1. At the end the marks are printed beside what was found. TorchRec
takes part where this interpreter can import it. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks import marks

COMMANDS: dict[str, list[str]] = {
    "step": ["--rounds", "4", "--steps", "5"],
    "dlrm": ["--rounds", "9", "--steps", "5"],
    "lookup": ["--rounds", "9"],
    "exchange": ["--rounds", "5"],
    "kjt": ["--rounds", "40"],
    "data": ["--rounds", "40"],
    "reading": ["--rounds", "3"],
    "sasrec": ["--rounds", "2", "--steps", "100"],
    "dynamic": ["--only", "map", "admit", "step", "--rounds", "5"],
    "serving": ["--rounds", "10", "--cap", "200000"],
    "driver": ["--rows", "600000"],
    "startup": ["--rounds", "2"],
    "startup_tables": ["--rounds", "3"],
    "planner": ["--seeds", "4", "--small", "8", "--write"],
    "memory": ["--sets", "8", "--write"],
}
LIMIT_S = 600


def main() -> int:
    """Run them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--skip", nargs="+", choices=COMMANDS, default=[])
    args = parser.parse_args()
    took: dict[str, str] = {}
    for name in args.only:
        if name in args.skip:
            continue
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        try:
            code = subprocess.run(
                [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name]], timeout=LIMIT_S
            ).returncode
            took[name] = (
                f"{time.monotonic() - start:.0f} s" if code == 0 else f"failed with code {code}"
            )
        except subprocess.TimeoutExpired:
            took[name] = f"failed: not done within {LIMIT_S} s"
    print("\n" + "\n".join(f"{name:<8} {what}" for name, what in took.items()))
    print("\n" + marks.table())
    return int(any(what.startswith("failed") for what in took.values()))


if __name__ == "__main__":
    sys.exit(main())
