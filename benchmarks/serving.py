"""A predictor's parts: the lookup of packed tables beside FBGEMM's bare operator, the whole model
beside its dense part, TorchRec's quantized collection where it is importable; interleaved.

    python -m benchmarks.serving [--rounds 40] [--cap 1000000]
    python -m benchmarks.serving --server      the server instead, see serving_load.py
    python -m benchmarks.serving --cold        a start from files on disk, see serving_cold.py

26 tables of Criteo's sizes, D 64, one id a bag, Zipf ids, one thread. "bare operator" gets ids and
offsets that are ready, and checks nothing. Every other call gets a fresh KeyedJaggedTensor of
values and lengths, of which nothing is cached, checks every id, and gives a KeyedTensor. "dense
part" is the DLRM's layers of 13-512-256-64 and 415-512-256-1 with pooled rows that are ready, and
"whole model" is `Predictor.predict` of ids and dense columns, as a server calls it; "compiled" that
of an artifact whose dense part was compiled at the export, where there is a C++ compiler.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.workload import CRITEO_ROWS, quartiles
from rayrec.checkpoint import save_checkpoint
from rayrec.data import DenseColumn, Feature, FeatureSchema
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TablePlacement, table_wise
from rayrec.layout.tables import PoolingType
from rayrec.machine.memory import tune_malloc
from rayrec.quant import QuantEmbeddingBagCollection
from rayrec.recipe import ModelRecipe
from rayrec.serve import ParityBounds, Predictor, export
from rayrec.shards.state import ShardState
from rayrec.sparse import KeyedJaggedTensor

WIDTH, DENSE = 64, 13
BATCHES = (1, 32, 512)
TYPES = ("int8", "fp32")
Timed = dict[str, Callable[[int], Any]]


def schema_of(cap: int) -> FeatureSchema:
    """26 tables of one feature each, and 13 dense columns."""
    rows = [min(size, cap) for size in CRITEO_ROWS]
    return FeatureSchema(
        label="label",
        dense=tuple(DenseColumn(column=f"d{i}") for i in range(DENSE)),
        features=tuple(Feature(name=f"f{i}", column=f"f{i}") for i in range(len(rows))),
        tables=tuple(
            EmbeddingBagConfig(
                num_embeddings=size,
                embedding_dim=WIDTH,
                name=f"t{i}",
                feature_names=[f"f{i}"],
                pooling=PoolingType.SUM,
            )
            for i, size in enumerate(rows)
        ),
    )


def saved(folder: Path, schema: FeatureSchema) -> str:
    """A checkpoint of random rows and of the initial dense part."""
    recipe = ModelRecipe(
        model="dlrm", schema=schema.to_json(), dense_layers=(512, 256), over_layers=(512, 256)
    )
    module = recipe()
    dense = {n: p.detach() for n, p in module.named_parameters() if "embedding_bags" not in n}
    layouts = {table.name: table_wise(table, 0) for table in schema.tables}
    plan = ShardingPlan(
        world_size=1, tables={name: TablePlacement(one) for name, one in layouts.items()}
    )
    sizes = {table.name: (table.num_embeddings, WIDTH) for table in schema.tables}
    save_checkpoint(
        str(folder),
        shards=[
            ShardState(shard, torch.empty(sizes[shard.table]).uniform_(-0.1, 0.1))
            for shard in plan.shards(0)
        ],
        tables=list(schema.tables),
        plan=plan,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
        dense=dense,
        step=1,
        extras=recipe.to_extras(),
    )
    return str(folder)


def zipf_ids(schema: FeatureSchema, rows: int, count: int) -> list[Tensor]:
    """(26 rows,) ids of so many batches; a power law of exponent 1.05, scattered over the rows."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(count):
        parts = []
        for table in schema.tables:
            size, a = table.num_embeddings, 1.05
            x = ((size ** (1 - a) - 1) * rng.random(rows) + 1) ** (1 / (1 - a))
            parts.append((x.astype(np.int64) - 1) * 2654435761 % size)
        batches.append(torch.from_numpy(np.concatenate(parts)))
    return batches


def cases(
    predictor: Predictor, compiled: Predictor | None, schema: FeatureSchema, rows: int
) -> Timed:
    """What is timed on batches of so many rows; each is called with the number of the call."""
    (collection,) = predictor.collections.values()
    assert isinstance(collection, QuantEmbeddingBagCollection)
    batches = zipf_ids(schema, rows, 64)
    names = [f"f{i}" for i in range(len(schema.tables))]
    lengths = torch.ones(len(names) * rows, dtype=torch.int32)
    offsets = torch.arange(len(names) * rows + 1)
    dense = torch.randn(rows, DENSE)
    lookup = collection._parts[0][1]
    pooled = collection(KeyedJaggedTensor(names, batches[0], lengths=lengths)).values()

    def fresh(call: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(names, batches[call % 64], lengths=lengths, stride=rows)

    def with_offsets(call: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(names, batches[call % 64], offsets=offsets, stride=rows)

    def bare(call: int) -> Tensor:
        ids = batches[call % 64]
        return lookup._operator(*lookup._arguments, ids, offsets, 0, None, 0)

    assert predictor.weights.scorer is not None
    dlrm = predictor.weights.scorer.model.model
    rows_BFD = pooled.view(rows, len(names), WIDTH)

    def dense_part(_: int) -> Tensor:
        return dlrm.over_arch(dlrm.inter_arch(dlrm.dense_arch(dense), rows_BFD)).sigmoid()

    timed: Timed = {
        "bare operator": bare,
        "collection": lambda call: collection(fresh(call)),
        "collection, given offsets": lambda call: collection(with_offsets(call)),
        "dense part": dense_part,
        "whole model": lambda call: predictor.predict(fresh(call), dense),
        **_peer(collection, schema, batches, lengths),
    }
    if compiled is not None:
        timed["whole model, compiled"] = lambda call: compiled.predict(fresh(call), dense)
    return timed


def compiled_twin(checkpoint: str, out: Path, stored: str) -> Predictor | None:
    """A predictor whose dense part is compiled; None where there is no compiler."""
    try:
        bounds = ParityBounds(logit=100, auc=1, ne=1)
        export(checkpoint, out, types=stored, bounds=bounds, compiled=True)
    except ConfigError:
        return None
    return Predictor.load(out)


def _peer(
    collection: QuantEmbeddingBagCollection,
    schema: FeatureSchema,
    batches: list[Tensor],
    lengths: Tensor,
) -> Timed:
    """TorchRec's quantized collection over the same rows; nothing where it is not importable."""
    try:
        import torchrec
        from torchrec.quant.embedding_modules import EmbeddingBagCollection as Quant
    except ImportError:
        return {}
    kinds = {table.kind.name for table in collection.packed.tables}
    if kinds != {"INT8"}:
        return {}
    tables = [
        torchrec.EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.num_embeddings,
            embedding_dim=WIDTH,
            feature_names=list(t.feature_names),
        )
        for t in schema.tables
    ]
    plain = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    for number, table in enumerate(schema.tables):
        plain.embedding_bags[table.name].weight.data.copy_(collection.packed.unpacked(number))
    activation = torch.quantization.PlaceholderObserver.with_args(dtype=torch.float)
    weight = torch.quantization.PlaceholderObserver.with_args(dtype=torch.qint8)
    plain.qconfig = torch.quantization.QConfig(activation=activation, weight=weight)
    quant = Quant.from_float(plain)
    del plain
    names = [f"f{i}" for i in range(len(schema.tables))]
    kjt = torchrec.KeyedJaggedTensor
    return {
        "torchrec": lambda call: quant(
            kjt(keys=names, values=batches[call % 64], lengths=lengths)
        ).values()
    }


def measure(timed: Timed, rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of a call, by case: a mean over `calls` in each of the interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for run in timed.values():
        for call in range(20):
            run(call)
    for _ in range(rounds):
        for name, run in timed.items():
            start = time.perf_counter()
            for call in range(calls):
                run(call)
            found[name].append((time.perf_counter() - start) / calls * 1e6)
    return found


def main() -> None:
    """Export, time, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, help="40, and 5 of --cold")
    parser.add_argument("--cap", type=int, help="rows of a table (1e6; --cold: 3.2e6)")
    parser.add_argument("--server", action="store_true", help="time the server instead")
    parser.add_argument("--cold", action="store_true", help="time a start from disk instead")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load on the server")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.server:
        from benchmarks import serving_load

        serving_load.run(1_000_000 if args.cap is None else args.cap, args.seconds)
        return
    if args.cold:
        from benchmarks import serving_cold

        cap = 3_200_000 if args.cap is None else args.cap
        serving_cold.run(cap, 5 if args.rounds is None else args.rounds)
        return
    args.rounds = 40 if args.rounds is None else args.rounds
    args.cap = 1_000_000 if args.cap is None else args.cap
    tune_malloc()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    schema, results = schema_of(args.cap), {}
    lines = [
        "| rows | what | least us | median us | beside | ratio of least | ratio of medians |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        checkpoint = saved(Path(folder, "checkpoint"), schema)
        for stored in TYPES:
            bounds = ParityBounds(logit=100, auc=1, ne=1)
            out = Path(folder, stored)
            start = time.perf_counter()
            manifest = export(checkpoint, out, types=stored, bounds=bounds)
            exported = time.perf_counter() - start
            start = time.perf_counter()
            predictor = Predictor.load(out)
            loaded = time.perf_counter() - start
            size = sum(file.bytes for file in manifest.files()) / 1e9
            lines.append(
                f"| {stored} | {size:.2f} GB, exported in {exported:.0f} s, loaded in "
                f"{loaded:.1f} s | | | | | |"
            )
            results[f"{stored}, files"] = {"gb": size, "export_s": exported, "load_s": loaded}
            compiled = compiled_twin(checkpoint, Path(folder, f"{stored}-compiled"), stored)
            for rows in BATCHES:
                calls = {1: 400, 32: 200, 512: 20}[rows]
                with torch.inference_mode():
                    took = measure(cases(predictor, compiled, schema, rows), args.rounds, calls)
                for name, beside in (
                    ("bare operator", None),
                    ("collection", "bare operator"),
                    ("collection, given offsets", "bare operator"),
                    ("torchrec", "collection"),
                    ("dense part", None),
                    ("whole model", "dense part"),
                    ("whole model, compiled", "dense part"),
                ):
                    if name not in took:
                        continue
                    own = quartiles(took[name])
                    results[f"{stored}, {rows} rows, {name}"] = own
                    line = f"| {rows} | {name}, {stored} | {own['min']:.1f} | {own['median']:.1f} |"
                    if beside is not None:
                        ratios = [a / b for a, b in zip(took[name], took[beside], strict=True)]
                        middle = quartiles(ratios)["median"]
                        least = own["min"] / quartiles(took[beside])["min"]
                        results[f"{stored}, {rows} rows, {name}"] = {
                            "us": own,
                            "ratio": quartiles(ratios),
                            "beside": beside,
                        }
                        line += f" {beside} | {least:.2f}x | {middle:.2f}x |"
                    else:
                        line += " | | |"
                    lines.append(line)
    ended = os.getloadavg()[0]
    results["load average"] = {"before": load, "after": ended}
    lines += [
        "",
        f"{args.rounds} interleaved rounds, one thread; a call takes the mean of many. Tables of "
        f"at most {args.cap:,} rows. The load average was {load:.1f} before and {ended:.1f} after.",
    ]
    report.show("serving", results, lines)


if __name__ == "__main__":
    main()
