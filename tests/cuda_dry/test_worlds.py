"""Random worlds of up to four GPU ranks train as the unsharded model, over changes of plan, too."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.comm.codec import Codecs, CommType, QCommsConfig
from rayrec.comm.exchange import Exchange
from rayrec.distributed import shard_embeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import TablePlacement
from rayrec.optim import Adagrad, RowWiseAdagrad
from tests.cuda_dry.worlds import run_ranks
from tests.simulation import STEPS, TOLERANCE, batches_of, run_sharded, targets_of
from tests.worlds import Reference, World, build_collections, output_of, random_layout, random_world

Outputs = list[list[torch.Tensor]]
Shards = list[tuple[object, torch.Tensor]]


def train(
    world: World, options: EngineOptions | None = None, reshard_at: int | None = None
) -> tuple[list[Outputs], list[Shards]]:
    """Outputs by rank and step, and the shards of every rank at the end.

    Args:
        reshard_at: the step before which the ranks go over to another plan.
    """
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    rng = random.Random(world.seed)
    placements = {t.name: TablePlacement(random_layout(t, world.hosts, rng)) for t in world.tables}
    other = replace(world.plan, tables=placements)

    def main(exchange: Exchange, device: torch.device) -> tuple[Outputs, Shards]:
        start = "meta" if world.seed % 2 else "cpu"
        modules, engine = shard_embeddings(
            build_collections(world, start),
            world.plan,
            exchange,
            world.optimizer,
            device,
            world.seed,
            options,
        )
        outputs = []
        for step in range(STEPS):
            if step == reshard_at:
                engine.reshard(other)
            kjt = batches[step][exchange.rank].to(device)
            found = [output_of(module, kjt) for module in modules]
            assert all(output.device == device for output in found)
            wanted = [target.to(device) for target in targets[step][exchange.rank]]
            sum((a * b).sum() for a, b in zip(found, wanted, strict=True)).backward()
            outputs.append([output.detach().cpu() for output in found])
        shards = [(state.shard, state.weight.detach().cpu()) for state in engine.shard_states()]
        return outputs, shards

    torch.manual_seed(world.seed)
    results = run_ranks(world.world_size, main)
    return [outputs for outputs, _ in results], [shards for _, shards in results]


def check(world: World, **how: object) -> None:
    """The world trains as the unsharded collections do."""
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    reference = Reference(world)
    outputs, shards = train(world, **how)  # type: ignore[arg-type]
    for step in range(STEPS):
        wanted = reference.step(batches[step], targets[step])
        for rank in range(world.world_size):
            for got, want in zip(outputs[rank][step], wanted[rank], strict=True):
                torch.testing.assert_close(got, want, **TOLERANCE)
    weights = reference.weights()
    for shard, weight in (one for rank in shards for one in rank):
        whole = weights[shard.table].detach()  # type: ignore[attr-defined]
        rows, cols = shard.rows, shard.cols  # type: ignore[attr-defined]
        want = whole[rows.start : rows.stop, cols.start : cols.stop]
        torch.testing.assert_close(weight, want, **TOLERANCE)


@pytest.mark.parametrize("seed", range(40))
def test_pooled_and_weighted_worlds_train_as_unsharded(seed: int) -> None:
    check(random_world(seed))


@pytest.mark.parametrize("seed", range(1000, 1025))
def test_worlds_with_sequences_train_as_unsharded(seed: int) -> None:
    check(random_world(seed, sequences=True))


@pytest.mark.parametrize("seed", range(2000, 2010))
def test_worlds_with_sequences_of_distinct_ids_train_as_unsharded(seed: int) -> None:
    check(random_world(seed, sequences=True), options=EngineOptions(dedup_sequences=True))


@pytest.mark.parametrize("seed", range(3000, 3015))
def test_worlds_whose_keys_have_different_batches_train_as_unsharded(seed: int) -> None:
    check(random_world(seed, varying=True))


@pytest.mark.parametrize("seed", range(4000, 4010))
def test_rows_may_be_narrowed_on_the_wire(seed: int) -> None:
    codecs = Codecs.from_config(QCommsConfig(CommType.FP16, CommType.BF16))
    world, options = random_world(seed), EngineOptions(codecs=codecs, share_tables=False)
    batches = batches_of(world, STEPS)
    wanted, _, _ = run_sharded(world, batches, targets_of(world, batches), False, options)
    outputs, _ = train(world, options)
    for rank, by_step in enumerate(outputs):
        for step, found in enumerate(by_step):
            for got, want in zip(found, wanted[step][rank], strict=True):
                torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("seed", range(5000, 5015))
def test_a_change_of_plan_moves_rows_between_gpus(seed: int) -> None:
    world = random_world(seed)
    if isinstance(world.optimizer, RowWiseAdagrad):  # exact as long as column blocks are kept
        world = replace(world, optimizer=Adagrad(lr=0.1, eps=1e-6))
    check(world, reshard_at=1)
