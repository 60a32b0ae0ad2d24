"""Dynamic tables: their map of ids, the mapping of a step, a step against a static one, and what
they learn where ids are born and die.

    python -m benchmarks.dynamic [--only map admit step drift] [--rows 10000000] [--rounds 9]

"map" and "admit" take one thread, whose CPU time is given beside the time of the wall: on a busy
machine the first is nearer to what a free core needs. "step" lets static and dynamic tables of the
same sizes take turns on the same batches, of which every id has a row after the warm-up; ranks read
rows in place, but for "exchanged" ones.
"drift" is `benchmarks.dynamic_drift`, with TorchRec's managed collisions where TorchRec is
installed.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.dynamic_drift import drift
from benchmarks.ranks import System, Turns, compare, time_in_turns
from benchmarks.step import ALONE, step_of
from benchmarks.workload import Workload, quartiles, zipf_ids
from rayrec.data.hashing import mix, to_ids
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.fused_rows import FusedRows
from rayrec.dynamic.id_map import IdMap
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, Shard

KEYS, BATCH, ZIPF = 1_000_000, 50_000, 1.05
BLOCK = 10_240  # rows of each of 1,024 blocks for 10,000,000 ids, which then fill none of them
FINDS, INSERTS, ADMIT_MS, STEP = 15e6, 10e6, 2.5, 1.25  # marks
CASES = {"pooled": ("table_wise", "exchanged", "dynamic", "dynamic_exchanged")}
CASES["sequence"] = ("sequence", *(f"sequence_{name}" for name in CASES["pooled"][1:]))


def keys_of(numbers: np.ndarray) -> Tensor:
    """Ids of 64 bits, one for each number."""
    return torch.from_numpy(to_ids(mix(numbers.astype(np.uint64))))


def timed(work: Callable[[Any], object], batches: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of the wall and of this thread for each batch, quartiles."""
    wall, cpu = [], []
    for batch in batches:
        start = time.perf_counter(), time.thread_time()
        work(batch)
        wall.append(1e3 * (time.perf_counter() - start[0]))
        cpu.append(1e3 * (time.thread_time() - start[1]))
    return {"wall_ms": quartiles(wall), "cpu_ms": quartiles(cpu)}


def id_map(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Finds and inserts of a map of a million keys."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    whole = IdMap(KEYS)
    whole.put(keys_of(np.arange(KEYS)), torch.arange(KEYS))
    batches = [keys_of(zipf_ids(rng, KEYS, BATCH, ZIPF)) for _ in range(50)]
    found["finds"] = timed(whole.find, batches)
    places, inserts = torch.arange(BATCH), []
    for _ in range(3):
        # the last tenth of the keys, so that the map is about as full as it becomes
        growing, first = IdMap(KEYS), KEYS * 9 // 10
        growing.put(keys_of(np.arange(first)), torch.arange(first))
        new = [keys_of(np.arange(at, at + BATCH)) for at in range(first, KEYS, BATCH)]
        inserts.append(timed(lambda ids, into=growing: into.put(ids, places), new))
    found["inserts"] = {
        kind: quartiles([one[kind]["median"] for one in inserts]) for kind in inserts[0]
    }
    lines = [f"| map of {KEYS:,} keys | M/s, CPU time | M/s, wall | mark |", "|---" * 4 + "|"]
    for name, mark in (("finds", FINDS), ("inserts", INSERTS)):
        rates = [BATCH / found[name][kind]["median"] / 1e3 for kind in ("cpu_ms", "wall_ms")]
        lines.append(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {mark / 1e6:g} |")
    return found, lines


def admit(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Rows of the ids of a step, in a table with so many live rows."""
    blocks = 1 << max(0, (args.rows // 9_766).bit_length() - 1)
    size = -(-args.rows // blocks) * BLOCK // 9_766
    config = EmbeddingBagConfig(
        blocks * size, 64, "t", feature_names=["f"], dynamic=DynamicConfig(blocks=blocks)
    )
    shard = Shard("t", range(config.num_embeddings), range(64), 0)
    rows = FusedRows([config], 0, [shard], [lambda places, values: None])
    step = 0
    for first in range(0, args.rows, 20 * BATCH):
        step += 1
        keys = keys_of(np.arange(first, min(first + 20 * BATCH, args.rows)))
        rows.admit(keys, [0, len(keys)], Instant(step))
    assert rows.of_shards[0].held(Instant(step)) == args.rows, "no block is full"
    rng, steps = np.random.default_rng(1), iter(range(step + 1, 10**9))
    batches = [keys_of(zipf_ids(rng, args.rows, BATCH, ZIPF)) for _ in range(60)]
    found = timed(lambda ids: rows.admit(ids, [0, BATCH], Instant(next(steps))), batches)
    found["distinct"] = quartiles([float(batch.unique().numel()) for batch in batches])
    cpu, wall = found["cpu_ms"], found["wall_ms"]
    lines = [
        f"Mapping {BATCH:,} Zipf({ZIPF}) ids a step, {found['distinct']['median']:,.0f} of them "
        f"different, into a table of {args.rows:,} live rows: {cpu['median']:.2f} ms of CPU time "
        f"({cpu['p25']:.2f} to {cpu['p75']:.2f}), {wall['median']:.2f} ms of the wall "
        f"({wall['p25']:.2f} to {wall['p75']:.2f}); mark {ADMIT_MS} ms."
    ]
    return found, lines


def steps(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """A step of dynamic tables against one of static tables, in turns."""
    work, found = Workload(cap=100_000), {}
    lines = [
        "| step | system | ms, median (quartiles) | CPU ms of a rank | time against static | CPU "
        "time against static | mark |"
    ]
    lines.append("|---" * 7 + "|")
    for case, variants in CASES.items():
        for ranks, last in ((2, ""), (1, ALONE)):
            # one rank has nobody whose rows it could read in place
            names = [
                f"rayrec {variant}"
                for variant in variants
                if ranks == 2 or "exchanged" not in variant
            ]
            systems = {name: System(step_of, (name, work), True, ranks) for name in names}
            times = time_in_turns(systems, Turns(args.rounds, 6, 10))
            compared = compare(times, names[0])
            if ranks == 2:  # exchanged ones against exchanged ones
                compared |= {names[3]: compare(times, names[1])[names[3]]}
            for name, one in compared.items():
                found[f"{case}, {name}{last}"] = one
                ms, ratio = one["ms"], one["ratio"]
                cpu = one["cpu_ms"] / compared[names[1 if name in names[3:] else 0]]["cpu_ms"]
                lines.append(
                    f"| {case}, {ranks} rank{'s' * (ranks > 1)} | {name} | {ms['median']:.2f} "
                    f"({ms['p25']:.2f} to {ms['p75']:.2f}) | {one['cpu_ms']:.2f} | "
                    f"{ratio['median']:.2f}x ({ratio['p25']:.2f} to {ratio['p75']:.2f}) | "
                    f"{cpu:.2f}x | "
                    # the mark is of exchanged ones and those in place, which one rank has not
                    f"{f'{STEP}x' if ranks == 2 and 'dynamic' in name else ''} |"
                )
    lines.append(
        f"\n{work.tables} tables of at most {work.cap:,} rows, {work.dim} columns, batch "
        f"{work.batch}, table-wise, {args.rounds} interleaved rounds."
    )
    return found, lines


def drifting(args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """The drifting world."""
    return drift()


PARTS = {"map": id_map, "admit": admit, "step": steps, "drift": drifting}


def main() -> None:
    """Run the parts, print and write after each."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, default=10_000_000, help="live rows of the mapping")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    lines: list[str] = []
    for part in args.only:
        before, start = os.getloadavg()[0], time.monotonic()
        found, table = PARTS[part](args)
        load = (
            f"({part}: {time.monotonic() - start:.0f} s; the load average was {before:.1f} before "
            f"and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores.)"
        )
        results[part] = {"found": found, "load": load}
        lines += [*table, "", load, ""]
        report.write("dynamic", results, "\n".join(lines))
    report.show("dynamic", results, lines)


if __name__ == "__main__":
    main()
