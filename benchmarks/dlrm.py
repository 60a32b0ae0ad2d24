"""One training step of a whole DLRM on local ranks: rayrec against TorchRec, interleaved in one
run.

    python -m benchmarks.dlrm [--ranks 2] [--rounds 7] [--steps 5] [--pooling 1]

26 Criteo-like tables of 64 columns, 13 dense columns, layers 512-256-64 below and 512-256-1 above,
row-wise Adagrad for the tables and SGD for the dense parameters. "rayrec" has rayrec's dense
modules, "rayrec, plain dense" the same layers written with nn.Linear and the formula of the
interaction, "rayrec, bfloat16" is "rayrec" with products in bfloat16, "torchrec" is TorchRec's own
DLRM, which is built of nn.Linear, too. The "dense only" lines run a rank's dense part alone,
forward and backward and update, on rows that are already there: what is left if sharding cost
nothing. Malloc's thresholds are raised as rayrec's ranks do it for themselves, but for the systems
named "shipped".
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import report
from benchmarks.ranks import ModelStep, Step, System, Turns, compare, time_in_turns
from benchmarks.systems import available, plan_of, planned_by_torchrec
from benchmarks.workload import Workload

DENSE, BELOW, ABOVE = 13, (512, 256), (512, 256, 1)
SYSTEMS = (
    "torchrec, shipped",
    "torchrec",
    "rayrec",
    "rayrec, plain dense",
    "rayrec, bfloat16",
    "dense only, rayrec",
    "dense only, plain",
    "dense only, bfloat16",
)


class PlainDLRM(nn.Module):
    """DLRM as its formulas say, of nn.Linear alone: (dense (B, I), ids) -> logits (B,).

    Args:
        collection: ids -> an object whose values() are (B, F * D).
        tables: F.
        width: D.
    """

    def __init__(self, collection: nn.Module, tables: int, width: int) -> None:
        super().__init__()
        self.collection, self.tables, self.width = collection, tables, width
        self.below = _layers(DENSE, (*BELOW, width), last=True)
        self.above = _layers(width + (tables + 1) * tables // 2, ABOVE, last=False)
        rows, cols = torch.triu_indices(tables + 1, tables + 1, offset=1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("cols", cols, persistent=False)

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        """Logits (B,)."""
        below = self.below(dense)
        found = self.collection(ids).values().view(-1, self.tables, self.width)
        rows = torch.cat((below.unsqueeze(1), found), dim=1)
        dots = torch.bmm(rows, rows.transpose(1, 2))[:, self.rows, self.cols]
        return self.above(torch.cat((below, dots), dim=1)).squeeze(1)


def _layers(wide: int, sizes: tuple[int, ...], last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, size in enumerate(sizes):
        layers.append(nn.Linear(wide, size))
        if last or i < len(sizes) - 1:
            layers.append(nn.ReLU())
        wide = size
    return nn.Sequential(*layers)


class _GivenRows(nn.Module):
    """In place of a collection: rows that are already there, whose gradient is computed and
    dropped.
    """

    def __init__(self, work: Workload, local: int) -> None:
        super().__init__()
        self.work, self.rows = work, torch.randn(local, work.tables * work.dim, requires_grad=True)

    def forward(self, ids: object) -> Any:
        from rayrec.sparse import KeyedTensor

        self.rows.grad = None
        return KeyedTensor(self.work.keys, [self.work.dim] * self.work.tables, self.rows)


def _unnamed(part: str) -> AbstractContextManager[None]:
    return nullcontext()


def _step(
    model: Any,
    optimizer: Any,
    dense: list[Tensor],
    labels: list[Tensor],
    kjt_of: Any,
    part: Any = _unnamed,
    bfloat16: bool = False,
) -> Step:
    def step(i: int) -> None:
        optimizer.zero_grad()
        ids = kjt_of(i)
        with part("dense"), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logits = model(dense[i % len(dense)], ids).squeeze(-1)
            loss = functional.binary_cross_entropy_with_logits(logits, labels[i % len(labels)])
        with part("backward"):
            loss.backward()
        with part("optimizer"):
            optimizer.step()

    return step


def build(rank: int, num_ranks: int, name: str, work: Workload) -> Step:
    """A step of one system on this rank, to be called by all ranks together."""
    batches, local = work.batches(rank, num_ranks, 8), work.batch // num_ranks
    generator = torch.Generator().manual_seed(rank)
    dense = [torch.rand(local, DENSE, generator=generator) for _ in batches]
    labels = [torch.randint(0, 2, (local,), generator=generator).float() for _ in batches]
    torch.manual_seed(0)
    if name == "torchrec":
        return _torchrec(work, num_ranks, batches, dense, labels)
    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import EmbeddingBagConfig
    from rayrec.models import DLRM
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.observe.timer import span
    from rayrec.optim import RowWiseAdagrad
    from rayrec.sparse import KeyedJaggedTensor

    tables = [
        EmbeddingBagConfig(n, work.dim, name=f"t{i}", feature_names=[work.keys[i]])
        for i, n in enumerate(work.rows)
    ]
    collection = EmbeddingBagCollection(tables, device="meta")
    plain, bfloat16 = "plain" in name, "bfloat16" in name
    model: Any = (
        PlainDLRM(collection, work.tables, work.dim)
        if plain
        else DLRM(collection, DENSE, [*BELOW, work.dim], list(ABOVE))
    )
    if name.startswith("dense only"):
        given = _GivenRows(work, local)
        if plain:
            model.collection = given
        else:
            model.sparse_arch.embedding_bag_collection = given
        parameters = list(model.parameters())
    else:
        plan = plan_of(tables, "table_wise", work, num_ranks)
        model = DistributedModelParallel(
            model, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=work.lr), seed=0
        )
        parameters = [p for _, p in model.dense_parameters()]

    def kjt_of(i: int) -> KeyedJaggedTensor:
        ids, lengths = batches[i % len(batches)]
        return KeyedJaggedTensor(work.keys, ids, lengths=lengths)

    optimizer = torch.optim.SGD(parameters, lr=work.lr)
    if not isinstance(model, DistributedModelParallel):
        return _step(model, optimizer, dense, labels, kjt_of, bfloat16=bfloat16)
    step = _step(
        model, optimizer, dense, labels, kjt_of, lambda part: span(model.timer, part), bfloat16
    )
    return ModelStep(step, model)


def _torchrec(
    work: Workload, num_ranks: int, batches: Any, dense: list[Tensor], labels: list[Tensor]
) -> Step:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=work.dim, num_embeddings=n, feature_names=[work.keys[i]]
        )
        for i, n in enumerate(work.rows)
    ]
    collection = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    model = DLRM(
        collection, DENSE, [*BELOW, work.dim], list(ABOVE), dense_device=torch.device("cpu")
    )
    sharded = planned_by_torchrec(model, EmbeddingBagCollectionSharder, work, num_ranks)()
    dense_parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = CombinedOptimizer(
        [
            sharded.fused_optimizer,
            KeyedOptimizerWrapper(
                dense_parameters, lambda params: torch.optim.SGD(params, lr=work.lr)
            ),
        ]
    )

    def kjt_of(i: int) -> KeyedJaggedTensor:
        ids, lengths = batches[i % len(batches)]
        return KeyedJaggedTensor(keys=work.keys, values=ids, lengths=lengths)

    return _step(sharded, optimizer, dense, labels, kjt_of)


def main() -> None:
    """Start the ranks of every system, let them take turns, print and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="steps of each system per round, or as many as take a quarter of a second",
    )
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--pooling", type=int, nargs="+", default=[1])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048, help="rows of the global batch")
    parser.add_argument("--cap", type=int, default=1_000_000, help="rows of the largest table")
    parser.add_argument(
        "--systems", nargs="+", default=SYSTEMS, help="the first that can run here is the reference"
    )
    report.add_profile_option(parser)
    args = parser.parse_args()
    names = available(args.systems)
    lines = [
        "| pooling | system | ms per step, median (quartiles) | CPU ms | faults "
        f"| speed against {names[0]} |",
        "|---|---|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for pooling in args.pooling:
        work = Workload(dim=args.dim, pooling=pooling, batch=args.batch, cap=args.cap)
        turns = Turns(args.rounds, args.steps, args.warmup)
        tuned = {name: "shipped" not in name for name in names}
        systems = {
            name: System(build, (name.removesuffix(", shipped"), work), tuned[name], args.ranks)
            for name in names
        }
        for name, found in compare(
            time_in_turns(systems, turns, report.profiles_of(args, f"pooling {pooling}")), names[0]
        ).items():
            ms, speed = found["ms"], {k: 1 / found["ratio"][k] for k in ("median", "p25", "p75")}
            results[f"pooling {pooling}, {name}"] = found
            middle = f"{ms['median']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f})"
            middle += f" | {found['cpu_ms']:.1f} | {found['faults']}"
            ratio = f"{speed['median']:.2f}x ({speed['p75']:.2f} to {speed['p25']:.2f})"
            lines.append(f"| {pooling} | {name} | {middle} | {ratio} |")
    lines.append(
        f"\nMedians over {args.rounds} rounds of {args.steps} steps or more, quartiles in "
        "brackets; CPU ms and faults of one rank per step."
    )
    report.show("dlrm", results, lines)


if __name__ == "__main__":
    main()
