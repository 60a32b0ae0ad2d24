"""One exchange between the ranks of this host: shared memory against gloo, and a copy of the same
bytes, interleaved in one run.

    python -m benchmarks.exchange [--ranks 2] [--sizes 16384 1048576 4194304 16777216]

Every rank sends `size` bytes, split evenly over all ranks, and reads what arrives: "all_to_all"
makes one tensor of it, "views" leaves it where it lies, "all_reduce" sums it over the ranks (gloo's
own, or the communication hook's way through shared memory).
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import report
from benchmarks.ranks import Step, System, Turns, compare, time_in_turns

SYSTEMS = (
    "gloo all_to_all",
    "shared all_to_all",
    "shared views",
    "gloo all_reduce",
    "shared all_reduce",
    "copy",
)
REPEATS = 20  # exchanges per step, since one is too short to time


def build(rank: int, num_ranks: int, name: str, size: int) -> Step:
    """`REPEATS` exchanges on this rank, to be called by all ranks together."""
    import torch.distributed as dist

    from rayrec.comm.choose import Transport, exchange_for
    from rayrec.comm.gradient_average import start_sum

    send, into = torch.ones(size // 4), torch.empty(size // 4)
    transport = Transport.PROCESS_GROUP if name.startswith("gloo") else Transport.SHARED_MEMORY
    exchange = exchange_for(None, torch.device("cpu"), transport)
    splits = [send.numel() // num_ranks] * num_ranks
    send, into = send[: sum(splits)], into[: sum(splits)]

    once: dict[str, Any] = {
        "all_to_all": lambda: exchange.all_to_all(send, splits, splits).wait(),
        "views": lambda: exchange.views(send, splits, splits).wait(),
        "gloo all_reduce": lambda: dist.all_reduce(into),
        "shared all_reduce": lambda: start_sum(exchange, into)(),  # type: ignore[arg-type]
        "copy": lambda: into.copy_(send),
    }
    call = once.get(name) or once[name.split()[-1]]

    def step(i: int) -> None:
        for _ in range(REPEATS):
            call()

    return step


def main() -> None:
    """Start the ranks of every system, let them take turns, print and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[16 << 10, 1 << 20, 4 << 20, 16 << 20],
        help="bytes that each rank sends",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help=f"of {REPEATS} exchanges each")
    args = parser.parse_args()
    lines = [
        "| bytes | exchange | us, median (quartiles) | time against a copy |",
        "|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for size in args.sizes:
        systems = {name: System(build, (name, size), True, args.ranks) for name in SYSTEMS}
        for name, found in compare(
            time_in_turns(systems, Turns(args.rounds, args.steps, 3, least_s=0.0)), "copy"
        ).items():
            us = {k: found["ms"][k] * 1e3 / REPEATS for k in ("median", "p25", "p75")}
            results[f"{size} bytes, {name}"] = {"us": us, "ratio": found["ratio"]}
            lines.append(
                f"| {size} | {name} | {us['median']:.0f} ({us['p25']:.0f} to {us['p75']:.0f}) | "
                f"{found['ratio']['median']:.1f}x |"
            )
    report.show("exchange", results, lines)


if __name__ == "__main__":
    main()
