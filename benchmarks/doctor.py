"""The pass of the table doctor beside reading alone, over the same checkpoint in one run.

    python -m benchmarks.doctor [--gb 1] [--rounds 5] [--cases trained,half dead] [--write]

One table of 64 columns with the state of row-wise Adagrad is saved in a temporary folder, and each
way goes over it in turn, the files in the page cache. "bytes" reads the files and does nothing with
them; "checked" reads the record batches and compares their sums, as a restore does; "doctor" is
`examine`. The exit code is 1 where the doctor has less than half of the speed of checked reading.

The cases differ in how many rows are as they began, since those are compared with their first
values: "trained" has none, and "half dead" has every second row without a gradient. In "unmoved"
gradients have reached all rows and changed none, which is the worst there is: all first values are
made again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks import report
from rayrec.checkpoint import ShardState, TableReader, read_manifest, save_checkpoint
from rayrec.doctor import examine
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TablePlacement, table_wise
from rayrec.modules.init import table_values
from rayrec.recipe import INIT_BOUND, ModelRecipe

WIDTH, LEAST = 64, 0.5
CASES = ("trained", "half dead", "unmoved")


def saved(folder: str, case: str, rows: int) -> str:
    """Save a checkpoint of one table; returns its folder."""
    schema = {
        "label": "click",
        "dense": ["age"],
        "features": [{"name": "user", "column": "user"}],
        "tables": [
            {"name": "user", "num_embeddings": rows, "embedding_dim": WIDTH, "features": ["user"]}
        ],
    }
    bounds = {"weight_init_min": -INIT_BOUND, "weight_init_max": INIT_BOUND}
    table = EmbeddingBagConfig(rows, WIDTH, name="user", feature_names=["user"], **bounds)
    plan = ShardingPlan(world_size=1, tables={"user": TablePlacement(table_wise(table, 0))})
    weight, sums = table_values(0, table, range(rows), range(WIDTH)), torch.ones(rows)
    if case != "unmoved":
        moved = slice(None, None, 2 if case == "half dead" else 1)
        weight[moved] += 0.01
        sums.zero_()[moved] = 1.0
    (shard,) = plan.shards(0)
    path = f"{folder}/{case.replace(' ', '-')}/step-00000001"
    save_checkpoint(
        path=path,
        shards=[ShardState(shard, weight, {"momentum1": sums})],
        tables=[table],
        plan=plan,
        dense={},
        step=1,
        cursor={"seed": 0},
        optimizers={"user": {"name": "rowwise_adagrad", "lr": 0.1}},
        extras=ModelRecipe(model="dlrm", schema=json.dumps(schema)).to_extras(),
        rank=0,
        world_size=1,
        gather=lambda value: [value],
    )
    return path


def read_bytes(path: str) -> None:
    """Read all files, a few megabytes at a time."""
    buffer = bytearray(8 << 20)
    for file in Path(path).rglob("*.arrow"):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def read_checked(path: str) -> None:
    """Read all record batches and check their bytes."""
    reader = TableReader(path, read_manifest(path))
    for _ in reader.parts("user"):
        pass


def peak_growth(run: Callable[[], object]) -> int:
    """Return by how many bytes the memory that belongs to no file has grown at most."""

    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    done, most, before = threading.Event(), 0, held()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return most - before


def main() -> None:
    """Measure the cases and say what was found."""
    parser = report.parser(__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true", help="write the results")
    args = parser.parse_args()
    rows = int(args.gb * 1e9 / (4 * WIDTH + 4))
    ways: dict[str, Callable[[str], object]] = {
        "bytes": read_bytes,
        "checked": read_checked,
        "doctor": examine,
    }
    results, lines, is_slow = {}, [], False
    lines.append("| case | bytes GB/s | checked GB/s | doctor GB/s | doctor / checked | memory |")
    lines.append("|---|---|---|---|---|---|")
    for case in args.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = saved(folder, case, rows)
            size = sum(file.stat().st_size for file in Path(path).rglob("*.arrow"))
            for run in ways.values():
                run(path)
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, run in ways.items():
                    start = time.perf_counter()
                    run(path)
                    took[name].append(time.perf_counter() - start)
            grown = peak_growth(lambda path=path: examine(path))
        pairs = zip(took["checked"], took["doctor"], strict=True)
        ratios = sorted(checked / doctor for checked, doctor in pairs)
        is_slow |= median(ratios) < LEAST
        results[case] = {"bytes": size, "seconds": took, "ratios": ratios, "grown_bytes": grown}
        speeds = " | ".join(f"{size / median(took[name]) / 1e9:.2f}" for name in ways)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {case} | {speeds} | {spread} | {grown / 1e6:.0f} MB |")
    if args.write:
        report.show("doctor", results, lines)
    else:
        print("\n".join(lines))
    sys.exit(int(is_slow))


if __name__ == "__main__":
    main()
