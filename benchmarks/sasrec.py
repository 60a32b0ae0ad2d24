"""Where the time of a training step of SASRec goes, with a large table of items on local ranks.

    python -m benchmarks.sasrec [--items 1000000] [--batch 64] [--steps 200] [--rounds 5]

Ranks of one thread train as `rayrec train` does, without Ray and with its defaults: histories of 5
to 50 items, a softmax over 512 sampled negatives, a row-wise table of 64 columns, Adam. Seconds by
part are those of the trainer's own timer, without the first steps; waits for other ranks are a row
of their own. Runs with and without a bias of each item take turns. What the optimizer takes less
without biases is their dense update; what the step takes less is all that they cost, with their
gradients, which are dense and averaged over the ranks.

The embedding part is all that happens to ids, rows and gradients of the table: the parts that the
planner prices, and the exchange of ids beside the step before, whole, although a free core hides
it. The mark is 15% of the step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import report
from benchmarks.ranks import join
from benchmarks.workload import quartiles, zipf_ids
from rayrec.data import NextItemDataset
from rayrec.layout import Topology
from rayrec.layout.rates import PARTS
from rayrec.models import NextItemTrain
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.observe.times import STEP_PARTS, RankTimes
from rayrec.planner import manual_plan
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs
from rayrec.runs.next_item import run_options
from rayrec.train.config import TrainSpec

SHORTEST, LONGEST, DIM = 5, 50, 64
MARK = 0.15
BIASED, PLAIN = "with biases", "without"
OTHERS = {
    "wait": "for other ranks, in all parts",
    "rest": "between the parts",
    "step": "",
    "ahead": "ids to the owners of their rows, beside the step before",
}
Row = dict[str, float]  # milliseconds by part
Builder = Callable[[], torch.nn.Module]


@dataclass(frozen=True)
class WithoutBiases:
    """A recipe whose model has no bias of the items."""

    recipe: Builder

    def __call__(self) -> torch.nn.Module:
        """Build the module."""
        module = self.recipe()
        assert isinstance(module, NextItemTrain)
        module.model.bias = None
        return module


def write_rows(folder: Path, rows: int, items: int) -> None:
    """Write histories, the item behind each, and the schema."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    past = pa.array(zipf_ids(rng, items, int(offsets[-1]), 1.05))
    columns = {
        "past": pa.ListArray.from_arrays(pa.array(offsets), past),
        "item": pa.array(zipf_ids(rng, items, rows, 1.05)),
    }
    (folder / "train").mkdir()
    pq.write_table(pa.table(columns), folder / "train" / "part-0.parquet", row_group_size=4096)
    schema = {
        "label": "label",
        "features": [{"name": "history", "column": "past"}, {"name": "item", "column": "item"}],
        "tables": [
            {
                "name": "t_item",
                "num_embeddings": items,
                "embedding_dim": DIM,
                "features": ["history", "item"],
                "pooling": "none",
            }
        ],
    }
    (folder / "schema.json").write_text(json.dumps(schema))


def specs_of(folder: Path, args: argparse.Namespace) -> dict[str, TrainSpec]:
    """Return both runs as plain data."""
    model, schema = NextItemModel(model="sasrec"), (folder / "schema.json").read_text()
    rows = open_data(str(folder / "train"), schema, with_labels=False)
    pairs = Pairs.of_rows(rows, model.history, model.item, model.longest)
    recipe = NextItemRecipe(schema=schema, model=model, counts=pairs.counts)
    options = run_options(model) | {"global_batch_size": args.batch, "steps": args.steps}
    candidates = recipe.candidates()
    assert candidates is not None, "the softmax is sampled"
    options["data"] = NextItemDataset(data=rows, candidates=candidates)
    options["plan"] = manual_plan([recipe.table()], "row_wise", Topology.local(args.ranks))
    builders: dict[str, Builder] = {BIASED: recipe, PLAIN: WithoutBiases(recipe)}
    return {name: TrainSpec(model=build, **options) for name, build in builders.items()}


def rank_main(rank: int, ranks: int, port: Any, spec: TrainSpec, queue: Any) -> None:
    """Train on one rank."""
    from rayrec.machine.memory import tune_malloc

    tune_malloc()

    from rayrec.comm.process_group import destroy_process_group
    from rayrec.train.loop import RankTrainer

    join(rank, ranks, lambda found: [port.put(found) for _ in range(ranks - 1)], port.get)
    with RankTrainer(spec) as trainer:
        trainer.run()
        queue.put(trainer.times())  # of all ranks
    destroy_process_group()


def train(spec: TrainSpec, ranks: int) -> Row:
    """Train in processes of its own; returns the mean step over the ranks."""
    context = mp.get_context("spawn")
    port, queue = context.Queue(), context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, spec, queue))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    (times, *_) = [queue.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(30)
    return mean_step(times)


def mean_step(ranks: Sequence[RankTimes]) -> Row:
    """Return the milliseconds of a step by part, waits apart, the mean over the ranks."""
    by_rank: list[Row] = []
    for rank in ranks:
        row = {name: part.seconds - part.waited for name, part in rank.parts.items()}
        # waits beside the step take no core
        ahead = sum(rank.parts[name].ahead - rank.parts[name].ahead_waited for name in PARTS)
        row |= {"wait": rank.waited_s, "rest": rank.rest_s, "step": rank.step_s, "ahead": ahead}
        by_rank.append(row)
    return {name: 1e3 * float(np.mean([row[name] for row in by_rank])) for name in by_rank[0]}


def shares(biased: Row, plain: Row) -> Row:
    """Return what share of a step is the embedding part, and what the biases take of it."""
    step = biased["step"]
    return {
        "embedding": sum(biased[name] for name in (*PARTS, "ahead")) / step,
        "update of biases": (biased["optimizer"] - plain["optimizer"]) / step,
        "all of biases": (step - plain["step"]) / step,
    }


def lines_of(runs: dict[str, list[Row]], found: dict[str, dict[str, float]]) -> list[str]:
    """Return the parts of a step and the shares, in Markdown."""
    lines = [f"| part | {BIASED}, ms | share | {PLAIN}, ms | what it is |", "|---" * 5 + "|"]
    middle = {
        side: {name: quartiles([run[name] for run in rows]) for name in rows[0]}
        for side, rows in runs.items()
    }
    for name, what in {**STEP_PARTS, **OTHERS}.items():
        both = [middle[side][name] for side in (BIASED, PLAIN)]
        if not any(one["max"] for one in both):
            continue
        cells = [f"{one['median']:.2f} ({one['p25']:.2f} to {one['p75']:.2f})" for one in both]
        share = both[0]["median"] / middle[BIASED]["step"]["median"]
        lines.append(f"| {name} | {cells[0]} | {share:.1%} | {cells[1]} | {what} |")
    told = {
        name: f"{one['median']:.1%} ({one['p25']:.1%} to {one['p75']:.1%})"
        for name, one in found.items()
    }
    met = "met" if found["embedding"]["median"] <= MARK else "missed"
    return [
        *lines,
        f"\nThe embedding part takes {told['embedding']} of the step; the mark of at most "
        f"{MARK:.0%} is {met}. The dense update of the items' biases takes "
        f"{told['update of biases']}, and all that is done for them {told['all of biases']}.",
    ]


def main() -> None:
    """Train in turns, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=64, help="histories of a step, of all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: dict[str, list[Row]] = {BIASED: [], PLAIN: []}
    with tempfile.TemporaryDirectory() as made:
        write_rows(Path(made), args.steps * args.batch, args.items)
        specs = specs_of(Path(made), args)
        for number in range(args.rounds):
            # the first of a round starts on a machine that has just rested
            for side in (BIASED, PLAIN)[:: -1 if number % 2 else 1]:
                runs[side].append(train(specs[side], args.ranks))
    by_round = [shares(*both) for both in zip(runs[BIASED], runs[PLAIN], strict=True)]
    found = {name: quartiles([one[name] for one in by_round]) for name in by_round[0]}
    lines = lines_of(runs, found)
    lines.append(
        f"\n{args.ranks} ranks of one thread, {args.items:,} items of {DIM} columns, {args.batch} "
        f"histories of {SHORTEST} to {LONGEST} items a step, medians (quartiles) of {args.rounds} "
        f"rounds of {args.steps} steps; the mean over ranks."
    )
    report.show("sasrec", {"runs": runs, "shares": found}, lines)


if __name__ == "__main__":
    main()
