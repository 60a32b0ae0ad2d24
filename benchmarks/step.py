"""One training step of embedding tables alone on local ranks: rayrec against TorchRec, interleaved
in one run.

    python -m benchmarks.step [--cases "pooling 1" sequence ...] [--rounds 7] [--steps 6] [--ranks
    2] python -m benchmarks.step --cases "pooling 1" --systems "rayrec table_wise" "rayrec grid"
    "torchrec table_wise"

A step is the forward pass of all tables, the backward pass of the sum of their outputs, and the
update (row-wise Adagrad). Every system has rank processes of its own; a few take turns at a time,
always with the case's references among them: TorchRec with malloc as shipped and as rayrec's ranks
tune it for themselves. TorchRec takes part where it is importable (it asks for an environment of
its own); on CPU it refuses row-wise kinds, so that its table-wise step is the reference of all.
"far" lets every message take 1 ms or more while the core is free, as between machines, and "stored"
lets a batch take 20 ms to arrive: there are the waits that a pipeline hides. Such cases are
compared with rayrec's own step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.ranks import RankEndedError, Step, System, Turns, compare, time_in_turns
from benchmarks.systems import available, build
from benchmarks.workload import Workload, bytes_floor

SHIPPED = ", shipped"  # malloc as it comes
ALONE = ", 1 rank"
CAP = 300_000  # rows of the largest tables: half a gigabyte a system, so that a dozen take turns


class Case(NamedTuple):
    """What is trained, the systems that others are compared with, and the others."""

    work: Workload
    references: tuple[str, ...]
    systems: tuple[str, ...]


_KINDS = (
    "rayrec table_wise",
    "rayrec row_wise",
    "rayrec column_wise",
    "rayrec grid",
    "rayrec mixed",
)
_TABLE_WISE = ("torchrec table_wise, shipped", "torchrec table_wise")
_DATA_PARALLEL = (
    ("torchrec data_parallel, shipped", "torchrec data_parallel"),
    ("rayrec data_parallel",),
)
_SEQUENCE = (
    ("torchrec sequence, shipped", "torchrec sequence"),
    ("rayrec sequence", "rayrec sequence_dedup"),
)
CASES = {
    "pooling 1": Case(
        Workload(cap=CAP),
        _TABLE_WISE,
        (
            *_KINDS,
            "rayrec pipeline",
            "rayrec fp16",
            "rayrec int8",
            "rayrec table_wise, 1 rank",
            "plain",
        ),
    ),
    "pooling 10": Case(
        Workload(pooling=10, cap=CAP),
        _TABLE_WISE,
        (*_KINDS, "rayrec int8", "rayrec table_wise, 1 rank"),
    ),
    "pooling 1, D 128": Case(Workload(dim=128, cap=CAP), _TABLE_WISE, ("rayrec table_wise",)),
    "sequence": Case(Workload(cap=CAP), *_SEQUENCE),
    "dlrm from record batches": Case(
        Workload(cap=CAP), ("rayrec dlrm",), ("rayrec dlrm pipeline",)
    ),
    "dlrm, slow storage": Case(
        Workload(cap=CAP), ("rayrec dlrm stored",), ("rayrec dlrm pipeline stored",)
    ),
    "ranks far apart": Case(
        Workload(cap=CAP), ("rayrec table_wise far",), ("rayrec pipeline far",)
    ),
    "data parallel, 4 x 1e5 rows": Case(Workload(tables=4, sizes=(100_000,) * 4), *_DATA_PARALLEL),
    "data parallel, 2 x 1e6 rows": Case(
        Workload(tables=2, sizes=(1_000_000,) * 2), *_DATA_PARALLEL
    ),
}


def step_of(rank: int, num_ranks: int, name: str, work: Workload) -> Step:
    """The step of one system on this rank."""
    return build(name, work, rank, num_ranks, work.batches(rank, num_ranks, 8))


def run_case(
    title: str, names: Sequence[str], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Times of the references, and of the other systems with the ratio of their time to the first
    reference's of their own turns.
    """
    case, turns, profiles = (
        CASES[title],
        Turns(args.rounds, args.steps, args.warmup),
        report.profiles_of(args, title),
    )
    references = [name for name in case.references if name in names] or list(names[:1])
    others = [name for name in names if name not in references]
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, max(1, len(others)), args.together):
        chunk = [*references, *others[first : first + args.together]]
        systems = {}
        for name in chunk:
            plain = name.removesuffix(SHIPPED).removesuffix(ALONE)
            systems[name] = System(
                step_of,
                (plain, case.work),
                not name.endswith(SHIPPED),
                1 if name.endswith(ALONE) else args.ranks,
            )
        try:
            times = time_in_turns(systems, turns, profiles)
        # gradients of torch's sparse tables, summed by gloo, end a process now and then
        except RankEndedError as error:
            if error.system != "plain":
                raise
            print(f"{error} It is left out.")
            times = time_in_turns(
                {name: system for name, system in systems.items() if name != "plain"},
                turns,
                profiles,
            )
        measured = compare(times, references[0])
        tuned = compare_to(measured, references)
        found = (
            {**measured, **found}
            if not found
            else {**found, **{k: v for k, v in measured.items() if k not in references}}
        )
        for name, speed in tuned.items():
            found[name]["to_last_reference"] = speed
    return found


def compare_to(measured: dict[str, dict[str, Any]], references: Sequence[str]) -> dict[str, float]:
    """Median time of the last reference over that of every system."""
    base = measured[references[-1]]["ms"]["median"]
    return {name: base / found["ms"]["median"] for name, found in measured.items()}


def main() -> None:
    """Start the ranks, let the systems take turns, print and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--systems", nargs="+", help="only these of every case")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="steps of each system per round, or as many as take a quarter of a second",
    )
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument(
        "--together",
        type=int,
        default=12,
        help="systems that take turns with the references; each holds its own tables",
    )
    parser.add_argument(
        "--label",
        help="name of the results files; step, or step-part where not "
        "all cases and systems take part",
    )
    report.add_profile_option(parser)
    args = parser.parse_args()
    # the whole stays as it is
    label = args.label or (None if args.cases == list(CASES) and not args.systems else "step-part")
    results: dict[str, Any] = {}
    lines = [
        "| case | system | ms per step, median (quartiles) | faults, waits | speed against the "
        "case's first | against its tuned one |",
        "|---|---|---|---|---|---|",
    ]
    shown, path = 0, report.RESULTS
    for title in args.cases:
        case = CASES[title]
        names = [
            n
            for n in available((*case.references, *case.systems))
            if not args.systems or n in args.systems
        ]
        if not names:
            continue
        for name, found in run_case(title, names, args).items():
            ms, ratio, waits = (
                found["ms"],
                found["ratio"],
                "" if found["waits"] is None else f", {found['waits']}",
            )
            results[f"{title}, {name}"] = found
            lines.append(
                f"| {title} | {name} | {ms['median']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f}) | "
                f"{found['faults']}{waits} | {1 / ratio['median']:.2f}x ({1 / ratio['p75']:.2f} to "
                f"{1 / ratio['p25']:.2f}) | {found['to_last_reference']:.2f}x |"
            )
        lines.append(
            f"| {title} | bytes that must move | {bytes_floor(case.work) / 1e6:.0f} MB | | | |"
        )
        # a run that is cut short keeps its cases
        path = report.write("step", results, "\n".join(lines), label)
        print("\n".join(lines[shown:]), flush=True)
        shown = len(lines)
    print("written:", path)


if __name__ == "__main__":
    main()
