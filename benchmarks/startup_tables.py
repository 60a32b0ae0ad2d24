"""The seconds that two ranks take to make their tables: DistributedModelParallel of rayrec against
TorchRec's, in turns.

    python -m benchmarks.startup_tables [--rounds 7] [--cap 1000000] [--dim 64]

Every turn has rank processes of its own, so that memory is new, as in a run that starts. What is
timed is the constructor alone, with a plan made before: memory, initial values, kernels. The
slowest rank counts. "shipped" is malloc as it comes, which is how TorchRec starts; rayrec's ranks
tune it. TorchRec takes part where it is importable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from benchmarks import report
from benchmarks.ranks import Ranks, Step, System
from benchmarks.systems import available, plan_of, planned_by_torchrec
from benchmarks.workload import Workload, quartiles

SYSTEMS = (
    "torchrec table_wise, shipped",
    "torchrec table_wise",
    "rayrec table_wise",
    "rayrec row_wise",
    "rayrec exchanged",
)


def maker(rank: int, num_ranks: int, name: str, work: Workload) -> Step:
    """A step that makes the sharded model of one system."""
    if name.startswith("torchrec"):
        return _torchrec(work, num_ranks)
    return _rayrec(work, num_ranks, name.partition(" ")[2])


def _rayrec(work: Workload, num_ranks: int, variant: str) -> Step:
    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import EmbeddingBagConfig
    from rayrec.modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(n, work.dim, name=f"t{i}", feature_names=[work.keys[i]])
        for i, n in enumerate(work.rows)
    ]
    kind = "table_wise" if variant == "exchanged" else variant
    plan = plan_of(tables, kind, work, num_ranks)
    made: list[Any] = []

    def make(_: int) -> None:
        collection = EmbeddingBagCollection(tables, device="meta")
        share = variant != "exchanged"
        made.append(DistributedModelParallel(collection, plan=plan, seed=0, share_tables=share))

    return make


def _torchrec(work: Workload, num_ranks: int) -> Step:
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=work.dim, num_embeddings=n, feature_names=[work.keys[i]]
        )
        for i, n in enumerate(work.rows)
    ]
    # the plan names modules below the one that is sharded
    model = nn.Sequential(EmbeddingBagCollection(device=torch.device("meta"), tables=tables))
    make_model = planned_by_torchrec(model, EmbeddingBagCollectionSharder, work, num_ranks)
    made: list[Any] = []
    return lambda _: made.append(make_model())


def main() -> None:
    """Let the systems take turns, print and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cap", type=int, default=1_000_000, help="rows of the largest tables")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()
    work = Workload(dim=args.dim, cap=args.cap)
    names = available(args.systems)
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    orders = np.random.default_rng(0)
    for _ in range(args.rounds):
        # in no fixed order: a virtual machine has, or has not, the memory of the one before
        for name in orders.permutation(names).tolist():
            plain = name.removesuffix(", shipped")
            ranks = Ranks(name, System(maker, (plain, work), name == plain, args.ranks))
            try:
                found[name].append(ranks.turn(0, 1))
            finally:
                ranks.close()
    seconds = {
        name: np.array([turn[:, 0].max() for turn in turns]) for name, turns in found.items()
    }
    base = seconds[names[0]]
    gigabytes = sum(work.rows) * work.dim * 4 / 1e9
    results: dict[str, Any] = {}
    lines = [
        f"| system | s for {gigabytes:.2f} GB, median (quartiles) | CPU s of a rank | page faults "
        f"of a rank | time against {names[0]} |",
        "|---|---|---|---|---|",
    ]
    for name, turns in found.items():
        taken, ratio = quartiles(seconds[name]), quartiles(seconds[name] / base)
        faults, cpu_s = (float(np.mean([turn[:, i] for turn in turns])) for i in (-2, -1))
        results[name] = {"s": taken, "ratio": ratio, "faults": round(faults), "cpu_s": cpu_s}
        lines.append(
            f"| {name} | {taken['median']:.2f} ({taken['p25']:.2f} to {taken['p75']:.2f}) | "
            f"{cpu_s:.2f} | {faults:,.0f} | {ratio['median']:.2f}x "
            f"({ratio['p25']:.2f} to {ratio['p75']:.2f}) |"
        )
    lines.append(f"\n{work.tables} tables, {args.ranks} ranks, {args.rounds} rounds in turns.")
    report.show("startup_tables", results, lines)


if __name__ == "__main__":
    main()
