"""Random worlds trained on simulated ranks, and compared with the unsharded reference.

The ranks are threads of one process (rayrec/comm/simulated.py), so that a world takes some
hundredths of a second.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.comm import SimulatedWorld
from rayrec.comm.exchange import Exchange
from rayrec.distributed import shard_embeddings
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import EmbeddingConfig, Shard, ShardingPlan
from rayrec.optim import SGD, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from tests.worlds import Reference, World, build_collections, output_of, part_of, whole_tables

# float32 sums in another order: a bag of four ids over row blocks, and gradients of equal ids over
# ranks
Close = dict[str, float]
TOLERANCE: Close = {"rtol": 2e-5, "atol": 2e-6}
STEPS = 3
CPU = torch.device("cpu")
PLAIN = SGD(lr=0.1)


def batches_of(world: World, steps: int) -> list[list[KeyedJaggedTensor]]:
    """[step][rank], with unequal and empty ranks among them."""
    rng = random.Random(world.seed + 1)
    return [
        [world.batch(rng.choice([0, 1, 3, 5]), rng) for _ in range(world.world_size)]
        for _ in range(steps)
    ]


def targets_of(
    world: World, batches: list[list[KeyedJaggedTensor]]
) -> list[list[list[torch.Tensor]]]:
    """Random gradients of every output: [step][rank][collection], shaped as `output_of`."""
    generator = torch.Generator().manual_seed(world.seed)

    def like(tables, kjt: KeyedJaggedTensor) -> torch.Tensor:
        if isinstance(tables[0], EmbeddingConfig):
            ids = sum(
                kjt[f].values().numel() * t.embedding_dim for t in tables for f in t.feature_names
            )
            return torch.randn(ids, generator=generator)
        inverse = kjt.inverse_indices_or_none()
        rows = kjt.stride() if inverse is None else inverse[1].shape[1]
        return torch.randn(
            rows, sum(t.embedding_dim * len(t.feature_names) for t in tables), generator=generator
        )

    return [
        [[like(tables, kjt) for tables in world.collections] for kjt in step] for step in batches
    ]


def sharded(
    model: nn.Module,
    plan: ShardingPlan,
    exchange: Exchange,
    optimizer: SparseOptimizer | dict[str, SparseOptimizer] = PLAIN,
    seed: int = 0,
    options: EngineOptions | None = None,
) -> tuple[Any, ShardedEmbeddings]:
    """`shard_embeddings` of a CPU rank: the model, and its engine."""
    return shard_embeddings(model, plan, exchange, optimizer, CPU, seed, options)


def sharded_world(
    world: World, exchange: Exchange, options: EngineOptions | None = None, device: str = "meta"
) -> tuple[Any, ShardedEmbeddings]:
    """The collections of a world on a CPU rank, and their engine."""
    collections = build_collections(world, device)
    return sharded(collections, world.plan, exchange, world.optimizer, world.seed, options)


def train_step(
    modules: Iterable[nn.Module], kjt: KeyedJaggedTensor, targets: Iterable[Tensor]
) -> list[Tensor]:
    """Outputs of all collections, which train by these gradients of them."""
    outputs = [output_of(module, kjt) for module in modules]
    sum((o * t).sum() for o, t in zip(outputs, targets, strict=True)).backward()
    return [output.detach() for output in outputs]


def run_sharded(
    world: World,
    batches,
    targets,
    meta: bool,
    options: EngineOptions | None = None,
    threads: int = 1,
):
    """Outputs [step][rank][collection] and the final (shard, weight, state) of all ranks, trained
    in a simulated world.

    Without options, worlds of even seeds read tables in place where they can.
    """
    options = options or EngineOptions(share_tables=world.seed % 2 == 0)

    def rank_main(exchange):
        # a thread that is new to torch takes over the number that was set last
        torch.get_num_threads()
        torch.set_num_threads(threads)
        modules, engine = sharded_world(world, exchange, options, "meta" if meta else "cpu")
        outputs = []
        for kjts, wanted in zip(batches, targets, strict=True):
            out = train_step(modules, kjts[exchange.rank], wanted[exchange.rank])
            outputs.append([o.clone() for o in out])
        return outputs, [
            (s.shard, s.weight.detach().clone(), dict(s.optimizer)) for s in engine.shard_states()
        ]

    simulated = SimulatedWorld(world.world_size)
    torch.manual_seed(world.seed)
    results = simulated.run(rank_main)
    outputs = [
        [results[rank][0][step] for rank in range(world.world_size)] for step in range(len(batches))
    ]
    return outputs, [state for _, states in results for state in states], simulated.collectives


def check_weight_gradients(world: World) -> None:
    """The gradients of learned weights of ids are those of the unsharded collections."""
    world.weighted = [True] * len(world.collections)
    batches = batches_of(world, 1)
    (targets,) = targets_of(world, batches)

    def grad_of(modules: nn.Module, rank: int) -> Tensor:
        kjt = batches[0][rank]
        weights = kjt.weights().clone().requires_grad_()
        sizes = kjt.lengths()
        learnable = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, sizes, stride=kjt.stride())
        train_step(modules, learnable, targets[rank])
        return torch.zeros_like(weights) if weights.grad is None else weights.grad

    def rank_main(exchange: Exchange) -> Tensor:
        torch.set_num_threads(1)
        return grad_of(sharded_world(world, exchange)[0], exchange.rank)

    for rank, got in enumerate(SimulatedWorld(world.world_size).run(rank_main)):
        # the dense part averages it over ranks, so here it is whole
        torch.testing.assert_close(got, grad_of(build_collections(world), rank), **TOLERANCE)


def check_same(found: tuple, wanted: tuple) -> None:
    """Two results of `run_sharded` are equal bit for bit: outputs, rows and optimizer state."""
    for a, b in zip(_flat(found[0]), _flat(wanted[0]), strict=True):
        assert torch.equal(a, b)
    for (shard, weight, state), (want_shard, want, want_state) in zip(
        sorted(found[1], key=place_of), sorted(wanted[1], key=place_of), strict=True
    ):
        assert (
            shard == want_shard and torch.equal(weight, want) and state.keys() == want_state.keys()
        )
        assert all(torch.equal(state[name], want_state[name]) for name in state)


def _flat(outputs: list[list[list[Tensor]]]) -> list[Tensor]:
    return [o for step in outputs for rank in step for o in rank]


def place_of(state: tuple) -> tuple[str, int, int, int]:
    """Where the shard of a state lies, to sort by."""
    return state[0].table, state[0].rank, state[0].rows.start, state[0].cols.start


def check_equals_unsharded(world: World, meta: bool, options: EngineOptions | None = None) -> None:
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    reference = Reference(world)
    outputs, states, _ = run_sharded(world, batches, targets, meta=meta, options=options)
    check_outputs(reference, batches, targets, outputs)
    check_rows(reference, [(shard, weight) for shard, weight, _ in states])


def check_outputs(
    reference: Reference, batches: Any, targets: Any, outputs: Any, close: Close = TOLERANCE
) -> None:
    """Outputs [step][rank][collection] are those of the unsharded tables, which train alike."""
    for step, got in enumerate(outputs):
        torch.testing.assert_close(got, reference.step(batches[step], targets[step]), **close)


def check_rows(
    reference: Reference, shards: Iterable[tuple[Shard, Tensor]], close: Close = TOLERANCE
) -> None:
    """The rows of all ranks are those of the unsharded tables, every cell of them."""
    shards = list(shards)
    whole_tables(reference.world.tables, shards)
    for shard, weight in shards:
        wanted = part_of(reference.weights()[shard.table].detach(), shard)
        torch.testing.assert_close(weight, wanted, **close)
