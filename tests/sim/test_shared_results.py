"""Collections that are given one batch share its exchange, and no result that is not theirs.

The reference is a model whose collections get copies of the batch, which share nothing.
"""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import row_wise, table_wise
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.optim import Adam
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import sharded
from tests.worlds import plan_for

TABLES = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
STEPS = 4
Batches = tuple[KeyedJaggedTensor, KeyedJaggedTensor]
# a step: the two towers, and what each of them is given
Step = Callable[[Any, Batches], None]


def frozen_tower(towers: Any, given: Batches) -> None:
    with torch.no_grad():
        before = towers[0](given[0]).values()
    (towers[1](given[1]).values() * (1 + before)).sum().backward()


def tower_of_inference(towers: Any, given: Batches) -> None:
    with torch.inference_mode():
        towers[0](given[0])
    towers[1](given[1]).values().square().sum().backward()


def backward_by_tower(towers: Any, given: Batches) -> None:
    for tower, kjt in zip(towers, given, strict=True):
        tower(kjt).values().square().sum().backward()


def train(step: Step, ranks: int, in_place: bool, is_shared: bool) -> list[list[Tensor]]:
    """The rows of each rank after some steps."""
    everywhere = range(ranks)
    layouts = {"t0": row_wise(TABLES[0], everywhere), "t1": table_wise(TABLES[1], ranks - 1)}
    plan = plan_for(ranks, layouts, (tuple(everywhere),))

    def rank_main(exchange: Exchange) -> list[Tensor]:
        torch.set_num_threads(1)
        towers = nn.ModuleList(EmbeddingBagCollection([t], device="meta") for t in TABLES)
        options = EngineOptions(share_tables=in_place)
        model, engine = sharded(towers, plan, exchange, Adam(lr=0.1), options=options)
        generator = torch.Generator().manual_seed(exchange.rank)
        for _ in range(STEPS):
            ids = torch.randint(0, 10, (6,), generator=generator)
            kjt = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([2, 1, 0, 3]))
            other = kjt if is_shared else kjt.flatten_lengths()
            step(model, (kjt, other))
        return [state.weight.detach().clone() for state in engine.shard_states()]

    return SimulatedWorld(ranks).run(rank_main)


@pytest.mark.parametrize("step", [frozen_tower, tower_of_inference, backward_by_tower])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_shared_batch_trains_as_copies_of_it(step: Step, ranks: int, in_place: bool) -> None:
    found = train(step, ranks, in_place, is_shared=True)
    wanted = train(step, ranks, in_place, is_shared=False)
    for rows, of_copies in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rows, of_copies, strict=True))


def towers_of_one_rank(in_place: bool) -> tuple[Any, Any]:
    plan = plan_for(1, {table.name: table_wise(table, 0) for table in TABLES})
    towers = nn.ModuleList(EmbeddingBagCollection([t], device="meta") for t in TABLES)
    return sharded(towers, plan, LocalExchange(), options=EngineOptions(share_tables=in_place))


def some_ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f0", "f1"], torch.arange(4), lengths=torch.tensor([2, 0, 1, 1]))


@pytest.mark.parametrize("in_place", [False, True])
def test_results_that_nobody_claimed_are_freed_with_their_model(in_place: bool) -> None:
    model, engine = towers_of_one_rank(in_place)
    kjt = some_ids()
    sum(tower(kjt).values().sum() for tower in model).backward()
    kjt = some_ids()
    output = model[0](kjt).values()
    (shared,) = kjt.carried.values()
    assert shared.waiting
    graph = weakref.ref(shared)
    del kjt, shared, output
    engine.close()
    gc.collect()
    assert graph() is None


def test_an_output_is_saved_without_a_warning() -> None:
    model, _ = towers_of_one_rank(in_place=True)
    output = model[0](some_ids()).values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())
