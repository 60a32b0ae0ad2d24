"""Dynamic tables on GPUs: ids come and go as on CPU ranks, and rows train alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from rayrec.checkpoint import restore_checkpoint, save_checkpoint
from rayrec.comm.exchange import LocalExchange
from rayrec.distributed import shard_embeddings
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.dynamic.known import copy_known
from rayrec.errors import ConfigError, PlanError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    ShardingPlan,
    Storage,
    TablePlacement,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adam, RowWiseAdagrad, SparseOptimizer
from rayrec.planner import ParameterConstraints
from rayrec.planner.constraints import storages_of
from rayrec.shards.copies import copy_touched
from rayrec.shards.state import IDS
from tests.cuda_dry.worlds import run_ranks
from tests.sim.dynamic_worlds import (
    KEYS,
    SEED,
    drifting,
    growing,
    kjt_of,
    random_model,
    random_plan,
    random_rule,
    random_times,
    train,
)
from tests.sim.known_ids import check_equal

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums in another order


@pytest.mark.seeds(range(60))
def test_ids_come_and_go_as_on_cpu_ranks(seed: int) -> None:
    rng = random.Random(seed)
    # four stand-ins, or as many as a machine has
    ranks = rng.randint(1, min(3, torch.cuda.device_count()))
    blocks = rng.choice([2, 4, 8])
    rules = random_rule(rng, blocks, read_only=(rng.choice(KEYS),)), random_rule(rng, blocks)
    rows = blocks * rng.choice([2, 5, 12])
    rules = growing(rng, rules[0], rows), rules[1]
    model = random_model(rng, ranks, rules, rows)
    steps = drifting(rng, ranks, 6)
    times = random_times(rng, steps)
    plans = {
        n: random_plan(model.tables, ranks, rng, model.optimizer)
        for n in (2, 4)
        if rng.random() < 0.5
    }
    more = {"times": times, "grows": (1, 3, 5), "track_rows": rng.random() < 0.5}
    wanted, known = train(model, steps, plans, **more)
    got, known_on_gpu = train(model, steps, plans, run_ranks=run_ranks, **more)
    check_equal(known_on_gpu, known)
    for of_rank, want_of_rank in zip(got, wanted, strict=True):
        for pair, want in zip(of_rank, want_of_rank, strict=True):
            torch.testing.assert_close(pair, want, **CLOSE)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), RowWiseAdagrad(lr=0.1)])
def test_checkpoints_go_between_gpu_and_cpu(tmp_path: Path, optimizer: SparseOptimizer) -> None:
    rule = DynamicConfig(admission_threshold=2, blocks=2)
    table = EmbeddingBagConfig(16, 8, "t", feature_names=list(KEYS), dynamic=rule)
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(table_wise(table, 0))})

    def model_on(device: torch.device) -> tuple[torch.nn.Module, ShardedEmbeddings]:
        module = EmbeddingBagCollection([table], device="meta")
        return shard_embeddings(module, plan, LocalExchange(), optimizer, device, SEED)

    batches = [{"f": [[5, 6], [7]], "g": [[5], [-9]]}, {"f": [[6, 7]], "g": [[-9, 8]]}] * 2
    module, engine = model_on(torch.device("cuda"))
    for bags in [*batches, {"f": [[9], [10]], "g": [[], []]}]:
        module(kjt_of(bags).to(torch.device("cuda"))).values().sum().backward()
    (state,) = engine.shard_states()
    assert state.weight.is_cuda and (state.ids["id_key"] != -1).sum() == 5
    save_checkpoint(
        str(tmp_path),
        shards=engine.shard_states(),
        tables=[table],
        plan=plan,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
        dense={},
        step=4,
    )
    for device in (torch.device("cpu"), torch.device("cuda")):
        other, restored = model_on(device)
        restore_checkpoint(str(tmp_path), restored.shard_states(), tables=[table])
        restored.id_clocks = engine.id_clocks
        with torch.no_grad():
            got, want = (
                m(kjt_of(batches[0]).to(d)).values().cpu()
                for m, d in ((other, device), (module, torch.device("cuda")))
            )
        torch.testing.assert_close(got, want)


def test_increments_and_deltas_are_copied_from_gpu_and_host() -> None:
    table = EmbeddingBagConfig(16, 8, "t", feature_names=list(KEYS), dynamic=DynamicConfig())
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(table_wise(table, 0))})
    copies = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        module = EmbeddingBagCollection([table], device="meta")
        options = EngineOptions(track_rows=True)
        given = LocalExchange(), Adam(lr=0.1), device, SEED, options
        module, engine = shard_embeddings(module, plan, *given)
        before = engine.id_clocks["t"]
        output = module(kjt_of({"f": [[5, 6], [7]], "g": [[5], [-9]]}).to(device)).values()
        output.sum().backward()
        (state,) = engine.shard_states()
        (rows,) = engine.touched.since(0).values()
        assert len(rows) == 4
        increment = copy_touched(state, rows)
        delta = copy_known(table, state, rows, before, engine.id_clocks["t"])
        copies.append([increment.weight, *increment.ids.values(), delta.weight, delta.ids[IDS]])
    torch.testing.assert_close(copies[1], copies[0], **CLOSE)


def test_rows_outside_of_the_gpus_memory_are_refused() -> None:
    table = EmbeddingBagConfig(16, 8, "t", feature_names=["f"], dynamic=DynamicConfig(blocks=2))
    layout = table_wise(table, 0)
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(layout, Storage("host"))})
    module = EmbeddingBagCollection([table], device="meta")
    with pytest.raises(ConfigError, match=r"'t' is dynamic, and has storage 'host'"):
        shard_embeddings(module, plan, LocalExchange(), SGD(0.1), torch.device("cuda"), SEED)
    one = ParameterConstraints(storage="host")
    with pytest.raises(PlanError, match=r"'t' is dynamic and has storage='host'"):
        storages_of(table, one, "cuda")
    assert [s.kind for s in storages_of(table, ParameterConstraints(), "cuda")] == ["device"]
