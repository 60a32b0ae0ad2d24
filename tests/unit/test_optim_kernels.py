"""Which kernel looks up and trains which tables, with which arguments, and in which memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.comm.pages import private_memory
from rayrec.distributed.kernels import cpu_lookup, parts
from rayrec.distributed.kernels.cpu_lookup import RowWiseAdagradLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import has_fused_kernel, kernel_arguments, make_lookup
from rayrec.distributed.kernels.torch_lookup import TorchLookup
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup, Slot, Use
from rayrec.errors import ConfigError
from rayrec.layout import DataType, Shard, Storage
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
)
from tests.optim_reference import FBGEMM_OPTIMIZERS, random_work
from tests.unit.optim_worlds import CPU


@pytest.mark.parametrize(
    ("optimizer", "cpu", "cuda"),
    [
        (SGD(), True, True),
        (Adagrad(max_gradient=1.0), True, True),
        (RowWiseAdagrad(), True, True),
        (RowWiseAdagrad(weight_decay=0.1), False, True),
        (RowWiseAdagrad(max_row_norm=1.0), False, False),
        (SGD(weight_decay=0.1), False, False),
        (Adagrad(weight_decay=0.1), False, False),
        (Adam(weight_decay=0.1), False, True),
        (Adam(weight_decay=0.1, weight_decay_mode="l2"), False, False),
        (PartialRowWiseAdam(), False, True),
        (LAMB(weight_decay=0.1), False, False),
        (LarsSGD(weight_decay=0.1), False, False),
    ],
    ids=str,
)
def test_kernel_is_fbgemms_where_it_trains_the_optimizer_as_defined(
    optimizer: SparseOptimizer, cpu: bool, cuda: bool
) -> None:
    assert has_fused_kernel(optimizer, "cpu") is cpu and has_fused_kernel(optimizer, "cuda") is cuda
    work = random_work(0, optimizer)
    if not cpu:
        assert isinstance(make_lookup(work.group, CPU), TorchLookup)


@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_fbgemms_adam_alone_refuses_float16_on_a_gpu(name: str) -> None:
    optimizer, half = SPARSE_OPTIMIZERS[name](lr=0.1), DataType.FP16
    assert has_fused_kernel(optimizer, "cuda", half) is (name != "adam")
    if name == "adam":
        work = random_work(0, optimizer, half, storage=Storage("host"))
        with pytest.raises(ConfigError, match=r"FP16 tables.*storage 'host'.*Adam on FP32"):
            make_lookup(work.group, torch.device("cuda"))


@pytest.mark.parametrize(
    ("optimizer", "data_type", "features", "kernel"),
    [
        (RowWiseAdagrad(), DataType.FP32, 1, RowWiseAdagradLookup),
        (RowWiseAdagrad(), DataType.FP32, 2, RowWiseAdagradLookup),
        (RowWiseAdagrad(max_gradient=1.0), DataType.FP32, 2, RowWiseAdagradLookup),
        (RowWiseAdagrad(), DataType.FP16, 1, TorchLookup),
        (SGD(), DataType.FP32, 1, TorchLookup),
        (Adagrad(), DataType.FP32, 1, TorchLookup),
    ],
)
def test_on_cpu_fbgemms_update_is_taken_where_it_is_vectorized(
    optimizer, data_type, features, kernel
) -> None:
    group = random_work(0, optimizer, data_type, weighted=False).group
    slots = tuple(replace(group.slots[0], piece=i) for i in range(features))
    lookup = make_lookup(LookupGroup(group.key, (slots[0].shard,), slots), CPU)
    assert isinstance(lookup, kernel)


@pytest.mark.parametrize("rows", [1 << 24, (1 << 24) + 1, (1 << 25) + 3])
def test_the_last_row_of_a_large_shard_gets_its_gradient(rows: int) -> None:
    """FBGEMM's update would add it to row 0 of a shard of more than 4 GiB."""
    work = random_work(0, RowWiseAdagrad(lr=0.5), weighted=False)
    shard = Shard("t", range(rows), range(64), 0)
    slot = replace(work.group.slots[0], shard=shard)
    lookup = make_lookup(LookupGroup(work.group.key, (shard,), (slot,)), CPU)
    assert isinstance(lookup, RowWiseAdagradLookup)
    ids = torch.tensor([shard.rows.stop - 1])
    lookup(GroupIds(ids, torch.tensor([0, 1]), None)).backward(torch.ones(1, 64))
    (state,) = lookup.shard_states()
    torch.testing.assert_close(state.weight[-1], torch.full((64,), -0.5))
    assert not state.weight[0].any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.seeds(range(60))
def test_rows_that_are_updated_band_by_band_are_those_updated_at_once(
    seed: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    optimizer = RowWiseAdagrad(lr=0.1, max_gradient=rng.choice([None, 0.3]))
    work = random_work(seed, optimizer, odd=False)
    workers = Workers(threads)
    whole = RowWiseAdagradLookup(work.group, workers, None, private_memory)
    least = max(slot.width for slot in work.group.slots)
    monkeypatch.setattr(cpu_lookup, "MOST_VALUES", least * rng.randint(1, 6))
    monkeypatch.setattr(parts, "LEAST_VALUES", 1)  # so that threads share little work, too
    banded = RowWiseAdagradLookup(work.group, workers, None, private_memory)
    work.fill(whole, banded)
    for bags in (5, 0, 1, 7):
        routed, grad = work.batch(bags), work.grad(bags)
        for lookup in (whole, banded):
            lookup(routed).backward(grad.clone())
    for one, other in zip(whole.shard_states(), banded.shard_states(), strict=True):
        assert torch.equal(one.weight, other.weight)
        for name, state in one.optimizer.items():
            assert torch.equal(state, other.optimizer[name])


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_a_step_allocates_by_touched_rows_not_by_table(name: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(0, optimizer, weighted=False)
    shard = Shard("t", range(200_000), range(16), 0)
    group = LookupGroup(work.group.key, (shard,), (replace(work.group.slots[0], shard=shard),))
    lookup = TorchLookup(group, CPU)
    routed = GroupIds(torch.tensor([3, 199_999, 3]), torch.tensor([0, 1, 3]), None)
    with torch.profiler.profile(profile_memory=True) as profile:
        lookup(routed).backward(torch.ones(2, 16))
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert 0 < taken < 20_000, f"{taken} bytes for 2 touched rows of a table of {200_000 * 16 * 4}"


def test_rows_outside_of_gpu_memory_need_fbgemms_kernel() -> None:
    optimizer = SGD(weight_decay=0.1)
    for storage in (Storage("host"), Storage("cached", 0.2)):
        with pytest.raises(ConfigError, match=f"storage '{storage.label}'"):
            make_lookup(random_work(0, optimizer, storage=storage).group, torch.device("cuda"))


def test_kernel_arguments_name_every_constant() -> None:
    arguments = kernel_arguments(
        Adam(0.2, eps=1e-5, beta1=0.8, beta2=0.9, weight_decay=0.3, max_gradient=2.0)
    )
    assert str(arguments.pop("optimizer")) == "adam"
    assert arguments == {
        "learning_rate": 0.2, "eps": 1e-5, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.3,
        "gradient_clipping": True, "max_gradient": 2.0,
    }  # fmt: skip
    row_wise = kernel_arguments(RowWiseAdagrad(weight_decay=0.3, weight_decay_mode="decoupled"))
    assert (
        row_wise["weight_decay_mode"].name == "DECOUPLE"
        and kernel_arguments(LarsSGD(momentum=0.5, eta=0.1))["eta"] == 0.1
    )


def test_odd_widths_have_a_kernel_on_gpus_whose_rows_lie_in_their_memory() -> None:
    group = next(
        w.group
        for w in (random_work(seed, SGD(), storage=Storage("host")) for seed in range(20))
        if w.group.key.odd
    )
    with pytest.raises(ConfigError, match=r"widths that are no multiple of 4.*storage 'host'"):
        make_lookup(group, torch.device("cuda"))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 18])
@pytest.mark.parametrize("data_type", DataType, ids=lambda t: t.value)
def test_means_over_an_odd_row_are_over_its_own_columns(width: int, data_type: DataType) -> None:
    optimizer = RowWiseAdagrad(0.5, eps=1e-6)
    key = replace(random_work(0, optimizer, data_type, weighted=False).group.key, odd=True)
    shard = Shard("t", range(3), range(width), 0)
    lookup = make_lookup(
        LookupGroup(key, (shard,), (Slot(Use(0, 0, "t", "f", 0, width), shard, 0, 0),)), CPU
    )
    grad = torch.arange(1.0, width + 1)[None]
    lookup(GroupIds(torch.tensor([1]), torch.tensor([0, 1]), None)).backward(grad)
    (state,) = lookup.shard_states()
    assert state.weight.shape == (3, width) and float(
        state.optimizer["momentum1"][1]
    ) == pytest.approx(float(grad.square().mean()))
    torch.testing.assert_close(
        state.weight[1].float(), -0.5 * grad[0] / grad.square().mean().sqrt(), rtol=1e-2, atol=1e-3
    )  # bfloat16 keeps 8 bits
    assert not state.weight[[0, 2]].any()
