"""How often a step stops the host: once, or three times where tables are cut by rows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.comm.exchange import Exchange
from rayrec.distributed import shard_embeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import TablePlacement, row_wise, table_wise
from rayrec.optim import RowWiseAdagrad
from rayrec.train import RankTrainer
from tests.cuda_dry import runtime
from tests.cuda_dry.models import GPU, batch, build
from tests.cuda_dry.runs import spec_of, write_clicks
from tests.cuda_dry.worlds import run_ranks
from tests.worlds import World, build_collections, output_of, random_world


def step_syncs(model: torch.nn.Module, seed: int) -> Counter[str]:
    """Where a pass forward and backward stops the host, for a batch as the loader makes it."""
    kjt = batch(seed).sync().to(GPU)
    with runtime.syncs() as found:
        model(kjt).sum().backward()
    return Counter(sync.where.split(":")[0] for sync in found)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "data_parallel"])
def test_collections_of_every_kind_stop_the_host_once_an_exchange(kind: str) -> None:
    model, _ = build(GPU, RowWiseAdagrad(lr=0.1), kind)
    for seed in range(3):  # the first passes learn who shares an exchange
        step_syncs(model, seed)
    # the collection whose weights a processor computes has an exchange of its own
    assert step_syncs(model, 3) == {"sparse/validate.py": 2}


def test_tables_cut_by_rows_are_checked_and_counted_before() -> None:
    model, _ = build(GPU, RowWiseAdagrad(lr=0.1), "row_wise")
    for seed in range(3):
        step_syncs(model, seed)
    # a world of one cuts nothing
    assert step_syncs(model, 3) == {"sparse/validate.py": 2}


def ranks_syncs(world: World, options: EngineOptions) -> list[Counter[str]]:
    """Of the third step, per rank: simulated ranks are threads, which tells them apart."""

    def main(exchange: Exchange, device: torch.device) -> None:
        modules, _ = shard_embeddings(
            build_collections(world, "meta"),
            world.plan,
            exchange,
            world.optimizer,
            device,
            0,
            options,
        )
        batch = world.batch(5, random.Random(exchange.rank)).sync()
        for step in range(3):
            kjt = batch.to(device)  # the keys of every step; those of the first are compiled
            exchange.meet()
            if step == 2 and exchange.rank == 0:
                recording.append(runtime.syncs())
                found.append(recording[0].__enter__())
            exchange.meet()
            outputs = [output_of(module, kjt) for module in modules]
            sum(output.sum() for output in outputs).backward()
            exchange.meet()

    recording: list[object] = []
    found: list[list[runtime.Sync]] = []
    run_ranks(world.world_size, main)
    recording[0].__exit__(None, None, None)  # type: ignore[attr-defined]
    by_rank = {f"simulated-rank-{rank}": Counter[str]() for rank in range(world.world_size)}
    for sync in found[0]:
        if sync.thread in by_rank and sync.where:
            by_rank[sync.thread][sync.where.split(":")[0]] += 1
    return list(by_rank.values())


def two_ranks(seed: int, cut: bool, **how: bool) -> World:
    """A world of two ranks whose tables are whole, or cut by rows."""
    # odd widths take the kernel in torch, which waits for the number of different rows
    world = random_world(seed, hosts=[(0, 1)], unit=4, **how)
    layouts = {}
    for i, table in enumerate(world.tables):
        layout = row_wise(table, [0, 1]) if cut else table_wise(table, i % 2)
        layouts[table.name] = TablePlacement(layout)
    return replace(world, plan=replace(world.plan, tables=layouts))


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_wait_for_the_headers_alone(seed: int, sequences: bool) -> None:
    for syncs in ranks_syncs(two_ranks(seed, False, sequences=sequences), EngineOptions()):
        assert syncs == {"comm/exchange.py": 1}


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_cut_tables_wait_for_the_check_the_counts_and_the_headers(
    seed: int, sequences: bool
) -> None:
    for syncs in ranks_syncs(two_ranks(seed, True, sequences=sequences), EngineOptions()):
        assert syncs == {
            "sparse/validate.py": 1,
            "distributed/steps/bucketize.py": 1,
            "comm/exchange.py": 1,
        }


@pytest.mark.parametrize("seed", range(4))
def test_ranks_whose_keys_have_different_batches_wait_no_more_often(seed: int) -> None:
    for syncs in ranks_syncs(two_ranks(seed, True, varying=True), EngineOptions()):
        assert syncs["distributed/steps/bucketize.py"] == syncs["comm/exchange.py"] == 1


def test_the_trainers_steps_stop_only_the_thread_that_works_ahead(tmp_path: Path) -> None:
    write_clicks(tmp_path)
    with RankTrainer(spec_of(tmp_path), "cuda") as trainer:
        trainer.run()
        pipeline, batches = trainer._pipeline, trainer._live.cursor.batches()
        pipeline.advance(batches)
        with runtime.syncs() as found:
            for _ in range(4):
                pipeline.advance(batches)
        pipeline.reset()
        batches.close()
    assert not [sync for sync in found if not sync.thread.startswith("prefetch")]
    assert 4 <= len(found) <= 5  # one of the next step may have begun
