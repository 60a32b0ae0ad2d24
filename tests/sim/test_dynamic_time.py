"""The time of the data in dynamic tables: where it comes from, who needs it, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrec.comm import SimulatedWorld
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.dynamic.clock import NO_TIME, Instant, clock_extras, clocks_in
from rayrec.errors import InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD
from tests.sim.dynamic_worlds import SEED, alone, kjt_of
from tests.simulation import sharded
from tests.worlds import plan_for

RULE = DynamicConfig(blocks=1, ttl_s=60)
TABLE = EmbeddingBagConfig(8, 8, "t", feature_names=["f", "g"], dynamic=RULE)
START = 1_700_000_000


def look_up(module: nn.Module, ids: list[int], time: int | None, train: bool = True) -> Tensor:
    output: Tensor = module(kjt_of({"f": [ids], "g": [[]]}, time)).values()
    if train:
        output.sum().backward()
    return output


def known(engine: ShardedEmbeddings | DistributedModelParallel) -> dict[int, int]:
    """Id -> when it was seen, of all ids that lie in rows."""
    (state,) = engine.shard_states()
    pairs = zip(state.ids["id_key"].tolist(), state.ids["id_time"].tolist(), strict=True)
    return {key: time for key, time in pairs if key != -1}


def test_the_clock_goes_on_and_never_back_and_evaluation_leaves_it_alone() -> None:
    def act(module: nn.Module, engine: ShardedEmbeddings) -> None:
        look_up(module, [10], START)
        look_up(module, [11], START - 500)  # a late batch: the clock stays where it was
        assert known(engine) == {10: START, 11: START}
        assert engine.id_clocks == {"t": Instant(2, START)}
        with torch.no_grad():
            assert look_up(module, [10], START + 10_000, train=False).any()
            assert look_up(module, [10], None, train=False).any()
        assert engine.id_clocks == {"t": Instant(2, START)}
        look_up(module, [12], START + 60)
        with torch.no_grad():
            assert look_up(module, [10], None, train=False).any(), "60 seconds are not over"
        look_up(module, [12], START + 61)
        with torch.no_grad():
            assert not look_up(module, [10], None, train=False).any()

    alone(TABLE, act)


def test_ids_without_a_time_are_refused_and_a_batch_without_ids_needs_none() -> None:
    says = r"rank 0: ids of table 't' come and go by the time of the data, and the batch has none"

    def act(module: nn.Module, engine: ShardedEmbeddings) -> None:
        with pytest.raises(InputError, match=says):
            look_up(module, [10], None)
        look_up(module, [], None)
        assert engine.id_clocks == {"t": Instant(1, NO_TIME)}
        look_up(module, [10], 0)  # a time of the data may begin anywhere
        assert (engine.id_clocks, known(engine)) == ({"t": Instant(2, 0)}, {10: 0})

    alone(TABLE, act)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_largest_time_of_any_rank_is_that_of_all(ranks: int) -> None:
    plan = plan_for(ranks, {"t": table_wise(TABLE, 0)})

    def rank_main(exchange: Any) -> Any:
        collection = EmbeddingBagCollection([TABLE], device="meta")
        module, engine = sharded(collection, plan, exchange, SGD(lr=1.0), SEED)
        clocks = []
        for times in ([START, None, START + 5], [START + 1, START + 9, START + 2], [None] * 3):
            time = times[exchange.rank] if ranks > 1 else max(t or -1 for t in times)
            time = None if time == -1 else time
            look_up(module, [] if time is None else [exchange.rank], time)
            clocks.append(engine.id_clocks["t"])
        return clocks

    wanted = [Instant(1, START + 5), Instant(2, START + 9), Instant(3, START + 9)]
    assert SimulatedWorld(ranks).run(rank_main) == [wanted] * ranks


def test_a_batch_that_was_routed_ahead_brings_its_time() -> None:
    bags = EmbeddingBagCollection(tables=[TABLE], device="meta")
    model = DistributedModelParallel(bags, sparse_optimizer=SGD(lr=1.0), seed=SEED, prefetch=True)
    look_up(model, [10], START)
    later = kjt_of({"f": [[11]], "g": [[]]}, START + 100)
    assert model.prefetch(later)
    look_up(model, [12], START + 7)
    model(later).values().sum().backward()
    model.close()
    assert known(model) == {10: START, 12: START + 7, 11: START + 100}


def test_a_clock_hears_of_time_only_where_a_table_asks() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            steps = replace(TABLE, name="s", dynamic=DynamicConfig(blocks=1, ttl_steps=2))
            beside = replace(TABLE, name="b", dynamic=DynamicConfig(blocks=1, ttl_steps=2))
            self.timed = EmbeddingBagCollection(tables=[TABLE, beside], device="meta")
            self.counted = EmbeddingBagCollection(tables=[steps], device="meta")

        def forward(self, kjt: Any) -> Tensor:
            return self.timed(kjt).values().sum() + self.counted(kjt).values().sum()

    model = DistributedModelParallel(Both(), sparse_optimizer=SGD(lr=1.0), seed=SEED)
    for time in (START, START + 5):
        model(kjt_of({"f": [[10]], "g": [[]]}, time)).backward()
    wanted = {"t": Instant(2, START + 5), "b": Instant(2), "s": Instant(2)}
    assert model.id_clocks == wanted == clocks_in(clock_extras(wanted))
    columns = {state.shard.table: set(state.ids) for state in model.shard_states()}
    steps = {"id_key", "id_seen", "id_hits"}
    assert columns == {"t": steps | {"id_time"}, "b": steps, "s": steps}


@pytest.mark.parametrize("saved", [{}, {"t": Instant(5)}])
def test_ids_of_unknown_times_are_as_old_as_the_first_time(saved: dict[str, Instant]) -> None:
    """A table that was static, or grew old by steps: its ids were in use, and nobody knows when."""

    def restored(module: nn.Module, engine: ShardedEmbeddings) -> Callable[[list[int]], bool]:
        (state,) = engine.shard_states()
        state.ids["id_key"][:3] = torch.tensor([20, 21, 22])
        state.weight[:3] = 1.0
        engine.id_clocks = saved

        def are_known(ids: list[int]) -> bool:
            with torch.no_grad():
                return all(look_up(module, [one], None, train=False).any() for one in ids)

        return are_known

    def act(module: nn.Module, engine: ShardedEmbeddings) -> None:
        are_known = restored(module, engine)
        assert are_known([20, 21, 22]) and set(known(engine).values()) == {NO_TIME}
        look_up(module, [10, 20], START)
        assert known(engine) == dict.fromkeys([10, 20, 21, 22], START)
        look_up(module, [20], START + 60)
        assert are_known([20, 21, 22])
        look_up(module, [20], START + 61)
        assert are_known([20]) and not are_known([21]) and not are_known([22])

    alone(TABLE, act)


def test_rows_that_learn_their_time_count_as_touched() -> None:
    """Else an increment would not hold the time, and undo would not take it back."""
    bags = EmbeddingBagCollection(tables=[TABLE], device="meta")
    model = DistributedModelParallel(bags, sparse_optimizer=SGD(lr=1.0), seed=SEED, track_rows=True)
    (state,) = model.shard_states()
    state.ids["id_key"][:3] = torch.tensor([20, 21, 22])
    model.id_clocks = {}
    assert model.touched is not None
    mark = model.touched.mark()
    look_up(model, [20], START)
    rows = model.touched.since(mark)[state.shard].tolist()
    assert rows == [0, 1, 2] and known(model) == dict.fromkeys([20, 21, 22], START)
