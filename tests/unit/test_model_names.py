"""Names, state_dicts and copies of a DistributedModelParallel on one rank, alone and inside another
module.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel, load_table
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, column_wise, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import (
    Adam,
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    SparseOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from rayrec.sparse import KeyedJaggedTensor
from tests.worlds import plan_for

TABLES = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
IDS = KeyedJaggedTensor(
    ["f0", "f1"], torch.tensor([1, 2, 3, 1]), lengths=torch.ones(4, dtype=torch.int64)
)


class Model(nn.Module):
    """Tables, a layer with buffers, and a child whose name is the one under which the sharded model
    keeps it.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(TABLES, device=device)
        self.norm = nn.BatchNorm1d(16)
        self.module = nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.module(self.norm(self.tables(ids).values()))


def sharded(optimizer: SparseOptimizer | None = None) -> DistributedModelParallel:
    plan = plan_for(1, {t.name: table_wise(t, 0) for t in TABLES})
    return DistributedModelParallel(
        Model(), plan=plan, sparse_optimizer=optimizer or RowWiseAdagrad(0.1), seed=5
    )


def changed() -> dict[str, Tensor]:
    """The state_dict of an unsharded model with other values."""
    return {name: value + 1 for name, value in Model("cpu").state_dict().items()}


def test_names_are_those_of_the_users_module() -> None:
    plain, model = Model("cpu"), sharded()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_buffers()] == [
        name for name, _ in plain.named_buffers()
    ]
    assert [name for name, _ in model.named_buffers("x", recurse=True)] == [
        f"x.{name}" for name, _ in plain.named_buffers()
    ]
    assert len(list(model.buffers())) == 3
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters() if "embedding_bags" not in n
    ]


def test_a_prefix_is_taken_off_and_other_names_are_let_alone() -> None:
    model, wanted = sharded(), changed()
    saved = {f"a.{name}": value for name, value in wanted.items()} | {"b.weight": torch.zeros(1)}
    result = model.load_state_dict(saved, prefix="a.")
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert list(model.state_dict(prefix="a.")) == list(saved)[:-1]
    del saved["a.norm.bias"]
    result = model.load_state_dict(saved | {"a.more": torch.zeros(1)}, strict=False, prefix="a.")
    assert (result.missing_keys, result.unexpected_keys) == (["a.norm.bias"], ["a.more"])
    with pytest.raises(ConfigError, match=r"prefix='a\.'"):
        model.load_state_dict(saved, "a.")


def test_a_sharded_model_inside_another_module_saves_and_loads() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = sharded(), nn.Linear(2, 2)

    outer, wanted = Outer(), {f"inner.{name}": value for name, value in changed().items()}
    assert list(outer.state_dict()) == [*wanted, "own.weight", "own.bias"]
    outer.load_state_dict({**wanted, "own.weight": torch.ones(2, 2), "own.bias": torch.ones(2)})
    found = outer.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "key", ["tables.embedding_bags.t0.momentum", "tables.embedding_bags.t9.weight", "more"]
)
def test_unknown_keys_are_refused_when_strict(key: str) -> None:
    model, saved = sharded(), changed()
    saved[key] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{key}"'):
        model.load_state_dict(saved)
    assert model.load_state_dict(saved, strict=False).missing_keys == []


@pytest.mark.parametrize("more", [(1, 0), (0, 4), (-1, 0)])
def test_a_table_of_another_size_is_refused(more: tuple[int, int]) -> None:
    model, key = sharded(), "tables.embedding_bags.t0.weight"
    before = model.state_dict()[key].clone()
    rows, columns = before.shape[0] + more[0], before.shape[1] + more[1]
    with pytest.raises(RuntimeError, match=rf"t0\.weight: .* is \({rows}, {columns}\)"):
        model.load_state_dict(changed() | {key: torch.ones(rows, columns)})
    assert torch.equal(model.state_dict()[key], before)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda o: o.name)
def test_a_deep_copy_trains_alike_and_apart(optimizer: SparseOptimizer) -> None:
    model = sharded(optimizer)
    model(IDS).square().sum().backward()
    twin, fused = copy.deepcopy((model, model.fused_optimizer))
    rows = [s.weight.clone() for s in twin.shard_states()]
    model(IDS).square().sum().backward()
    assert all(torch.equal(s.weight, w) for s, w in zip(twin.shard_states(), rows, strict=True))
    twin(IDS).square().sum().backward()
    for mine, theirs in zip(model.shard_states(), twin.shard_states(), strict=True):
        assert not torch.equal(theirs.weight, rows[0]) and torch.equal(mine.weight, theirs.weight)
    fused.param_groups[0]["lr"] = 0.0
    fused.param_groups[-1]["lr"] = 0.0
    stays = [s.weight.clone() for s in twin.shard_states()]
    twin(IDS).square().sum().backward()
    assert all(torch.equal(s.weight, w) for s, w in zip(twin.shard_states(), stays, strict=True))


def test_a_schedule_made_anew_after_a_reshard_has_its_base_rates() -> None:
    model = sharded(RowWiseAdagrad(0.4))
    dense = KeyedOptimizerWrapper(
        dict(model.dense_parameters()), lambda params: torch.optim.Adam(params, lr=0.1)
    )

    def scheduled() -> WarmupOptimizer:
        parts = [("dense", dense), ("tables", model.fused_optimizer)]
        stages = [WarmupStage(WarmupPolicy.LINEAR, 4, 0.0)]
        return WarmupOptimizer(CombinedOptimizer(parts), stages, lr=None)

    old = scheduled()
    for _ in range(2):
        old.step()
    # column blocks are other kernels, and so are the names of their state
    model.reshard(plan_for(1, {t.name: column_wise(t, [0, 0]) for t in TABLES}))
    new = scheduled()
    state = new.state_dict()
    state["state"]["__warmup"] = old.state_dict()["state"]["__warmup"]
    new.load_state_dict(state)
    assert [group["lr"] for group in new.param_groups] == [0.05, 0.2]
    for _ in range(2):
        new.step()
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.4]
    torch_scheduler = torch.optim.lr_scheduler.LambdaLR(model.fused_optimizer, lambda step: 0.5)
    assert torch_scheduler.get_last_lr() == [0.2]


def test_a_schedule_of_torch_leaves_its_base_rates_to_the_next_one() -> None:
    model = sharded(RowWiseAdagrad(0.4))
    old = torch.optim.lr_scheduler.LambdaLR(model.fused_optimizer, lambda step: 0.5**step)
    old.optimizer.step()
    old.step()
    model.reshard(plan_for(1, {t.name: column_wise(t, [0, 0]) for t in TABLES}))
    rates = [(group["lr"], group["initial_lr"]) for group in model.fused_optimizer.param_groups]
    assert rates == [(0.2, 0.4)]


def test_a_rate_that_is_set_is_the_base_of_the_next_schedule() -> None:
    model = sharded(RowWiseAdagrad(0.4))
    WarmupOptimizer(model.fused_optimizer, [WarmupStage(WarmupPolicy.LINEAR, 4, 0.0)], lr=None)
    model.set_learning_rate(0.05)
    (group,) = WarmupOptimizer(model.fused_optimizer, [], lr=None).param_groups
    assert group["lr"] == 0.05


@pytest.mark.parametrize("plan", ["row_wise", None, {}], ids=str)
def test_what_is_no_plan_and_no_rows_is_refused(plan: object) -> None:
    model = sharded()
    with pytest.raises(ConfigError, match=r"reshard has plan=.*; it must be ShardingPlan\("):
        model.reshard(plan)  # type: ignore[arg-type]
    for own, source in ((None, torch.zeros(10, 8)), (model, None), (model, 3)):
        with pytest.raises(ConfigError, match=r"load_table has .*; it must be an instance of"):
            load_table(own, "t0", source)  # type: ignore[arg-type]


def test_a_pickle_is_refused_since_its_rows_would_be_torn_from_their_kernels() -> None:
    model = sharded()
    for thing in (model, model.fused_optimizer):
        with pytest.raises(ConfigError, match="save_checkpoint"):
            pickle.dumps(thing)
