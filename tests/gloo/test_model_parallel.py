"""DLRM under DistributedModelParallel: N ranks equal one rank, names equal the unsharded module's,
state_dicts load both ways.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from rayrec.comm import choose
from rayrec.comm.codec import CommType, QCommsConfig
from rayrec.distributed import DistributedModelParallel, planning, table_configs
from rayrec.errors import ConfigError, PlanError
from rayrec.layout import EmbeddingBagConfig, column_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adam, sparse_optimizer
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import STEPS, build, changed, check_holds, make_plan, parts
from tests.ranks import RankPool
from tests.worlds import part_of, plan_for

SMALL = 1_520_000  # bytes of a machine whose rank has room for its batch, and for no table


def train(rank: int, world_size: int, kind: str, optimizer: str):
    """Loss sums by step and the final parameters: dense by name, tables as rectangles."""
    model = DistributedModelParallel(
        build(),
        plan=make_plan(kind, world_size),
        sparse_optimizer=sparse_optimizer(optimizer, 0.05),
        share_tables=kind == "auto",
    )
    names = [name for name, _ in model.named_parameters()]
    dense = torch.optim.Adam([p for _, p in model.dense_parameters()], lr=1e-2)
    losses = [
        float(train_step(model, dense, parts(step, rank, world_size), world_size).loss_sum)
        for step in range(STEPS)
    ]
    tables = [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]
    return losses, names, {n: p.detach().clone() for n, p in model.named_parameters()}, tables


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["auto", "mixed"])
def test_loss_curves_and_weights_of_1_2_and_4_ranks_are_equal(
    ranks: RankPool, kind: str, optimizer: str
) -> None:
    # float32: sums over ranks in another order, and Adam divides by the root of small second
    # moments
    close = {"rtol": 1e-4, "atol": 1e-5}
    runs = {w: ranks.run(w, train, kind, optimizer) for w in (1, 2, 4)}
    whole = {shard.table: weight for shard, weight in runs[1][0][3]}
    unsharded = [
        name for name, _ in build("cpu").named_parameters() if "embedding_bags" not in name
    ]
    for results in runs.values():
        curve = torch.tensor([r[0] for r in results]).sum(0)
        torch.testing.assert_close(curve, torch.tensor(runs[1][0][0]), **close)
        for _, names, dense, tables in results:
            assert names == unsharded
            for name, value in dense.items():
                torch.testing.assert_close(value, runs[1][0][2][name], **close)
            for shard, weight in tables:
                torch.testing.assert_close(weight, part_of(whole[shard.table], shard), **close)


def round_trip(rank: int, world_size: int):
    """Load an unsharded state_dict, compare what is held, and give the state_dict's keys back."""
    model = DistributedModelParallel(build(), plan=make_plan("mixed", world_size))
    result = model.load_state_dict(changed().state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    check_holds(model, changed().state_dict())
    own = model.state_dict()
    assert not model.load_state_dict(own).missing_keys
    return list(own), [tuple(v.size()) for v in own.values()]


def test_state_dict_has_the_unsharded_names_and_shapes(ranks: RankPool) -> None:
    source = build("cpu").state_dict()
    for keys, shapes in ranks.run(2, round_trip):
        assert keys == list(source)
        assert shapes == [tuple(v.shape) for v in source.values()]


def meta_dense(rank: int, world_size: int):
    model = DistributedModelParallel(
        build(dense_device="meta"), plan=make_plan("mixed", world_size)
    )
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_a_model_wholly_on_meta_is_initialized_alike_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(2, meta_dense)
    assert first and all(torch.equal(first[n], second[n]) for n in first)
    assert all(p.isfinite().all() for p in first.values())


def wrong_world(rank: int, world_size: int):
    with pytest.raises(PlanError, match="for 3 ranks"):
        DistributedModelParallel(build(), plan=make_plan("mixed", 3))
    return True


def test_a_plan_for_another_number_of_ranks_is_refused(ranks: RankPool) -> None:
    assert ranks.run(2, wrong_world) == [True, True]


def train_unplanned(rank: int, world_size: int, what: str):
    """The plan that a model without one makes, and its losses; the last rank's machine may be
    another.
    """
    odd, put_off = world_size - 1, what == "DDP put off"
    with pytest.MonkeyPatch.context() as patch:
        if rank == odd and what == "memory":
            patch.setattr(os, "sysconf", lambda name: SMALL if name == "SC_PHYS_PAGES" else 1)
        if rank == odd and what == "host":
            for module in (choose, planning):
                patch.setattr(module, "host_identity", lambda: "another")
        model = DistributedModelParallel(
            build(), sparse_optimizer=SGD(lr=0.05), seed=3, init_data_parallel=not put_off
        )
    dense = torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.05)
    losses = [
        float(train_step(model, dense, parts(step, rank, world_size), world_size).loss_sum)
        for step in range(STEPS)
    ]
    return model.plan, losses


@pytest.mark.parametrize("what", ["nothing", "memory", "host", "DDP put off"])
def test_ranks_without_a_plan_make_the_same_one_from_all_of_their_machines(
    ranks: RankPool, what: str
) -> None:
    (alone, wanted), *_ = ranks.run(1, train_unplanned, "nothing")
    assert alone.shards(0) == alone.shards()
    (first, losses), (second, others) = ranks.run(2, train_unplanned, what)
    assert first == second
    assert first.hosts == (((0,), (1,)) if what == "host" else ((0, 1),))
    assert bool(first.shards(1)) == (what != "memory")
    curve = torch.tensor([losses, others]).sum(0)
    torch.testing.assert_close(curve, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def two_plans(rank: int, world_size: int):
    with pytest.raises(PlanError, match="rank 1 has another plan than rank 0"):
        DistributedModelParallel(build(), plan=make_plan(["mixed", "auto"][rank], world_size))
    return True


def test_ranks_with_different_plans_are_refused(ranks: RankPool) -> None:
    assert ranks.run(2, two_plans) == [True, True]


def marked_dense(rank: int, world_size: int):
    module = build()
    _apply_optimizer_in_backward(torch.optim.SGD, module.model.over_arch.parameters(), {})
    with pytest.raises(ConfigError, match=r"over_arch.*Mark tables alone"):
        DistributedModelParallel(module)
    return True


def test_marks_of_torch_on_dense_parameters_of_several_ranks_are_refused(ranks: RankPool) -> None:
    assert ranks.run(2, marked_dense) == [True, True]


def plan_groups(rank: int, world_size: int):
    return DistributedModelParallel(build(), sharding_group_size=2).plan


def test_sharding_groups_without_a_plan_make_the_one_of_a_group(ranks: RankPool) -> None:
    first, *others = ranks.run(4, plan_groups)
    assert first.world_size == 2 and others == [first] * 3


def test_without_a_plan_the_planner_counts_optimizers_weights_and_the_wire() -> None:
    tables = [EmbeddingBagConfig(100, 8, name="t", feature_names=["f"])]
    bags = EmbeddingBagCollection(tables, device="meta", is_weighted=True)
    qcomms = QCommsConfig(CommType.FP16, CommType.INT8)
    made = DistributedModelParallel(bags, sparse_optimizer=Adam(), qcomms=qcomms).plan
    planner = EmbeddingShardingPlanner(
        planning.topology_of(None, torch.device("cpu"), grouped=False),
        512,
        {"t": ParameterConstraints(weighted=True)},
        sparse_optimizer="adam",
        qcomms_forward="fp16",
        qcomms_backward="int8",
    )
    assert made.estimates.ranks == planner.plan(tables).estimates.ranks


def test_a_module_that_is_sharded_already_and_strange_names_of_tables_are_refused() -> None:
    model = DistributedModelParallel(build())
    for again in (model, torch.nn.Sequential(model.module)):
        with pytest.raises(ConfigError, match=r"sharded already; .* model.reshard\(plan\)"):
            DistributedModelParallel(again)
    by_table = dict.fromkeys(["t0", "t1", "t2", "t3", "table"], SGD(lr=0.1))
    with pytest.raises(ConfigError, match="names table 'table', which is not among"):
        DistributedModelParallel(build(), sparse_optimizer=by_table)


def test_without_a_process_group_the_world_is_one_rank() -> None:
    model = DistributedModelParallel(
        build(), plan=make_plan("auto", 1), sparse_optimizer=SGD(lr=0.1)
    )
    before = [s.weight.clone() for s in model.shard_states()]
    train_step(model, None, parts(0, 0, 1), 1)
    assert any(
        not torch.equal(a, s.weight) for a, s in zip(before, model.shard_states(), strict=True)
    )


def test_one_rank_with_several_rectangles_of_a_table_has_one_state() -> None:
    tables = table_configs(build())
    plan = plan_for(1, {t.name: column_wise(t, [0, 0]) for t in tables})
    model = DistributedModelParallel(build(), plan=plan)
    wanted = build("cpu").state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())
    changed = {name: value + 1 for name, value in wanted.items()}
    model.load_state_dict(changed)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in changed.items())


def train_in_eval_mode(rank: int, world_size: int):
    """Dense gradients after a backward in eval mode and inside no_sync: (averaged, own)."""
    plan = make_plan("mixed", world_size)
    model = DistributedModelParallel(build(), plan=plan, init_data_parallel=False)
    model.eval()
    batch = parts(0, rank, world_size)
    with model.no_sync():
        model(batch)[0].backward()
    own = next(p for _, p in model.dense_parameters()).grad.clone()
    model.zero_grad()
    model(batch)[0].backward()
    return next(p for _, p in model.dense_parameters()).grad.clone(), own


def test_gradients_are_averaged_in_eval_mode_too_but_not_inside_no_sync(ranks: RankPool) -> None:
    (first, own_first), (second, own_second) = ranks.run(2, train_in_eval_mode)
    assert torch.equal(first, second)
    assert not torch.equal(own_first, own_second)


def train_by_several_backward_passes(rank: int, world_size: int):
    model = DistributedModelParallel(
        build(), plan=make_plan("mixed", world_size), sparse_optimizer=SGD(lr=0.1)
    )
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batches = [parts(step + i, rank, world_size) for i in range(2)]
        losses = [model(b)[0] * (b.rows * world_size / b.global_rows) for b in batches]
        dense.zero_grad()
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        dense.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_backward_pass_of_a_step_averages_gradients(ranks: RankPool) -> None:
    (wanted,) = ranks.run(1, train_by_several_backward_passes)
    for found in ranks.run(2, train_by_several_backward_passes):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


class Counting(torch.nn.Module):
    """Passes batches on, and counts them."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, batch):
        self.calls += 1
        return self.inner(batch)


def train_a_module_put_around(rank: int, world_size: int) -> int:
    plan = make_plan("mixed", world_size)
    model = DistributedModelParallel(build(), plan=plan, init_data_parallel=False)
    model.module = Counting(model.module)
    model(parts(0, rank, world_size))[0].backward()
    return model.module.calls


def test_a_module_that_is_put_around_before_the_first_step_trains(ranks: RankPool) -> None:
    assert ranks.run(2, train_a_module_put_around) == [1, 1]
