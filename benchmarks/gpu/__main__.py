"""The command: `python -m benchmarks.gpu [--device cuda|cpu] [--out FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.absent import stand_in_for_pyarrow

LIMIT_S = 580  # of all parts together
EPILOG = """exit status: 0 when no part failed, 1 when any did, 2 for a wrong command.
docs/gpu.md says what each part shows and how to prepare a machine without a network."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=(sys.modules["benchmarks.gpu"].__doc__ or ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    found.add_argument("--out", type=Path, metavar="FILE", help="write all results as JSON")
    found.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    found.add_argument("--skip", nargs="+", default=[], metavar="PART", help="all but these")
    found.add_argument("--size", choices=("full", "small", "tiny"), help="default: by device")
    found.add_argument("--backend", help="of process groups; default: nccl or gloo")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"default: {LIMIT_S}")
    found.add_argument("--part", help=argparse.SUPPRESS)  # one part, in this process
    found.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return found


def main() -> int:
    """Run the parts; returns the exit status."""
    options = parser()
    args = options.parse_args()
    stand_in_for_pyarrow()
    import torch

    from benchmarks.gpu import parts
    from benchmarks.gpu.checks import FAIL, Notes, Settings

    for name in (args.only or []) + args.skip + ([args.part] if args.part else []):
        if name not in parts.PARTS:
            options.error(f"no part {name!r}; there are {', '.join(parts.PARTS)}")
    has_gpu = torch.cuda.is_available()
    device = args.device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        options.error("--device cuda: torch sees no GPU here; --device cpu runs what needs none")
    settings = Settings(
        device=device,
        size=args.size or ("full" if device == "cuda" else "small"),
        backend=args.backend or ("nccl" if device == "cuda" else "gloo"),
        seed=args.seed,
    )
    if args.part:
        parts.run_here(args.part, settings, Notes(args.into))
        return 0
    wanted = [name for name in args.only or parts.PARTS if name not in args.skip]
    results = run_all(wanted, settings, args.limit_s)
    if args.out is not None:
        about = {"benchmark": "gpu", "date": date.today().isoformat(), **settings._asdict()}
        args.out.write_text(json.dumps(about | {"parts": results}, indent=1) + "\n")
        print(f"\nwritten: {args.out}")
    failed = [name for name, result in results.items() if result["status"] == FAIL]
    print(f"\n{len(results) - len(failed)} of {len(results)} parts without a failure")
    return int(bool(failed))


def run_all(wanted: list[str], settings: Any, limit_s: float) -> dict[str, Any]:
    """Every part in a process of its own, with a line of the table as each ends."""
    from benchmarks.gpu import parts
    from benchmarks.gpu.checks import FAIL

    print(f"device {settings.device}, size {settings.size}, backend {settings.backend}\n")
    print("checks: passed / failed / skipped\n")
    print(f"{'part':<12} {'status':<8} {'checks':>12} {'s':>6}  what was found", flush=True)
    began, results = time.monotonic(), {}
    for name in wanted:
        left = limit_s - (time.monotonic() - began)
        if left < 5:
            result = parts.skipped(f"the {limit_s:.0f} s of --limit-s were over")
        else:
            result = parts.run_apart(name, settings, left)
        results[name] = result
        line = f"{name:<12} {result['status']:<8} {parts.counts(result):>12} {result['s']:>6}"
        print(f"{line}  {parts.summary(result)}", flush=True)
        for check in result["checks"]:
            if check["status"] == FAIL:
                print(f"{'':<13}{check['name']}: {check['detail']}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
