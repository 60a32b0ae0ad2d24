"""Try every mistake and print how each ends: python -m tests.mistakes [--only WORD] [--cold]

Ends with 1 when a command does not end as the table says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.leftovers import shared_memory, unheld
from tests.mistakes.case import Ending, Mistake, faults
from tests.mistakes.report import markdown, outcome
from tests.mistakes.run import Runner
from tests.mistakes.sound import make_sound
from tests.mistakes.tables import MISTAKES


def main() -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__)
    add = parser.add_argument
    add("--only", metavar="WORD", default="", help="only mistakes whose title holds this")
    add("--cold", action="store_true", help="start a new interpreter for every command")
    add("--processes", type=int, default=2, help="commands beside each other (default 2)")
    add("--markdown", metavar="FILE", help="write the table by command")
    add("--failed", action="store_true", help="print only what does not end as it should")
    args = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if args.only in mistake.title]
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        endings = try_all(chosen, Path(folder), args.processes, args.cold, args.failed)
    bad = sum(1 for mistake, ending in endings if faults(mistake, ending))
    if args.markdown:
        Path(args.markdown).write_text(markdown(endings))
    print(f"\n{markdown(endings)}\n{len(endings)} mistakes, {bad} do not end as they should")
    left = sorted(unheld(shared_memory() - shared))
    if left:
        print(f"left in shared memory: {', '.join(left)}")
    return 1 if bad or left else 0


def try_all(
    chosen: list[Mistake], folder: Path, processes: int, cold: bool, failed_only: bool
) -> list[tuple[Mistake, Ending]]:
    """Try mistakes on some runners beside each other, and print each as it ends."""
    data, scratch = folder / "data", folder / "scratch"
    data.mkdir()
    scratch.mkdir()
    make_sound(data)
    runners: Queue[Runner] = Queue()
    for _ in range(processes):
        runners.put(Runner(data, scratch, cold))

    def one(mistake: Mistake) -> tuple[Mistake, Ending]:
        runner = runners.get()
        try:
            ending = runner.run(mistake)
        finally:
            runners.put(runner)
        if faults(mistake, ending) or not failed_only:
            print(outcome(mistake, ending), flush=True)
        return mistake, ending

    try:
        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(one, chosen))
    finally:
        while not runners.empty():
            runners.get().close()


if __name__ == "__main__":
    sys.exit(main())
