"""The torch kernel trains by the formulas of every optimizer, and equals FBGEMM's kernel and
torch's optimizers where they overlap.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.distributed.kernels import touched_rows
from rayrec.distributed.kernels.cpu_lookup import RowWiseAdagradLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import (
    FusedLookup,
    has_fused_kernel,
    kernel_arguments,
    make_lookup,
)
from rayrec.distributed.kernels.torch_lookup import TorchLookup
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
    RMSprop,
    RowWiseAdagrad,
    SparseOptimizer,
)
from tests.optim_reference import (
    FBGEMM_OPTIMIZERS,
    ReferenceTable,
    pooled,
    random_optimizer,
    random_work,
    summed_gradients,
)

CPU = torch.device("cpu")
STEPS = 4
# float32 sums and four updates against float64; Adagrad and Adam divide by roots of small sums
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.seeds(range(15))
@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_lookup_and_update_equal_the_formula(name: str, seed: int) -> None:
    optimizer = random_optimizer(name, random.Random(f"{name}{seed}"))
    work = random_work(seed, optimizer)
    lookup = TorchLookup(work.group, optimizer, CPU)
    work.fill(lookup)
    tables = [ReferenceTable(state.weight, optimizer) for state in lookup.shard_states()]
    for step in range(1, STEPS + 1):
        num_bags = work.rng.choice([0, 1, 3, 6])
        routed, grad = work.batch(num_bags), work.grad(num_bags)
        out = lookup(routed)
        torch.testing.assert_close(
            out.double(), pooled(work.group, [t.tensor() for t in tables], routed), **TOLERANCE
        )
        out.backward(grad)
        for table, grads in zip(
            tables, summed_gradients(work.group, routed, grad, optimizer.max_gradient), strict=True
        ):
            table.update(optimizer, step, grads)
    for state, table in zip(lookup.shard_states(), tables, strict=True):
        torch.testing.assert_close(state.weight.double(), table.tensor(), **TOLERANCE)
        assert list(state.optimizer) == list(optimizer.state_widths)
        for state_name, tensor in state.optimizer.items():
            torch.testing.assert_close(tensor.double(), table.tensor(state_name), **TOLERANCE)


EQUALS_TORCH = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "sgd decay": (SGD(0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    "adagrad": (Adagrad(0.1, eps=1e-4), lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-4)),
    "adagrad decay": (
        Adagrad(0.1, eps=1e-4, weight_decay=0.2),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-4, weight_decay=0.2),
    ),
    "rmsprop": (
        RMSprop(0.1, eps=1e-4, alpha=0.9),
        lambda p: torch.optim.RMSprop(p, 0.1, alpha=0.9, eps=1e-4),
    ),
    "rmsprop decay": (
        RMSprop(0.1, eps=1e-4, weight_decay=0.2),
        lambda p: torch.optim.RMSprop(p, 0.1, eps=1e-4, weight_decay=0.2),
    ),
    "adam": (Adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "adam l2": (
        Adam(0.1, weight_decay=0.2, weight_decay_mode="l2"),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.2),
    ),
    "adamw": (Adam(0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2)),
}


@pytest.mark.parametrize("case", EQUALS_TORCH)
def test_equals_the_dense_optimizer_when_every_row_is_touched(case: str) -> None:
    optimizer, make = EQUALS_TORCH[case]
    work = random_work(3, optimizer, weighted=False)
    lookup = TorchLookup(work.group, optimizer, CPU)
    work.fill(lookup)
    dense = [torch.nn.Parameter(state.weight.clone()) for state in lookup.shard_states()]
    outer = make(dense)
    sizes = [len(slot.shard.rows) for slot in work.group.slots]
    num_bags = max(sizes)  # bag b of every slot holds row b, modulo the rows
    ids = torch.cat([torch.arange(num_bags) % rows for rows in sizes])
    routed = GroupIds(ids, torch.arange(ids.numel() + 1), None)
    for _ in range(5):
        grad = work.grad(num_bags)
        lookup(routed).backward(grad)
        outer.zero_grad()
        parts = [
            dense[work.group.shards.index(slot.shard)][ids[:num_bags] % rows]
            for slot, rows in zip(work.group.slots, sizes, strict=True)
        ]
        torch.cat(parts, 1).backward(grad)
        outer.step()
    for state, want in zip(lookup.shard_states(), dense, strict=True):
        torch.testing.assert_close(state.weight, want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.seeds(range(5))
def test_adam_is_torchs_sparse_adam_on_touched_rows(seed: int) -> None:
    # SparseAdam adds eps before the bias correction, so a small one
    optimizer = Adam(0.1, eps=1e-12)
    work = random_work(seed, optimizer, weighted=False)
    lookup = TorchLookup(work.group, optimizer, CPU)
    work.fill(lookup)
    tables = [torch.nn.Parameter(state.weight.clone()) for state in lookup.shard_states()]
    outer = torch.optim.SparseAdam(tables, 0.1, eps=1e-12)
    for _ in range(STEPS):
        routed, grad = work.batch(4), work.grad(4)
        lookup(routed).backward(grad)
        outer.zero_grad()
        for table, grads in zip(tables, summed_gradients(work.group, routed, grad), strict=True):
            rows = torch.tensor(sorted(grads), dtype=torch.int64)
            values = torch.tensor([grads[row] for row in sorted(grads)]).view(-1, table.shape[1])
            table.grad = torch.sparse_coo_tensor(
                rows.unsqueeze(0), values, table.shape, check_invariants=True
            )
        outer.step()
    for state, want in zip(lookup.shard_states(), tables, strict=True):
        torch.testing.assert_close(state.weight, want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16], ids=lambda t: t.value)
@pytest.mark.seeds(range(12))
def test_torch_kernel_equals_fbgemm(seed: int, data_type: DataType) -> None:
    rng = random.Random(seed)
    optimizer = [SGD, Adagrad, RowWiseAdagrad][seed % 3](
        lr=0.1, max_gradient=rng.choice([None, 0.3])
    )
    work = random_work(seed, optimizer, data_type, odd=False)
    ours, fused = TorchLookup(work.group, optimizer, CPU), FusedLookup(work.group, optimizer, CPU)
    work.fill(ours, fused)
    # fp16 rounds each update
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if data_type is DataType.FP32 else {"rtol": 4e-3, "atol": 4e-3}
    )
    for _ in range(STEPS):
        routed, grad = work.batch(5), work.grad(5)
        a, b = ours(routed), fused(routed)
        torch.testing.assert_close(a, b, **tolerance)
        a.backward(grad)
        b.backward(grad.clone())
    for mine, theirs in zip(ours.shard_states(), fused.shard_states(), strict=True):
        assert (
            mine.shard == theirs.shard
            and mine.weight.dtype == theirs.weight.dtype
            and list(mine.optimizer) == list(theirs.optimizer)
        )
        torch.testing.assert_close(mine.weight, theirs.weight, **tolerance)
        for name in mine.optimizer:
            torch.testing.assert_close(mine.optimizer[name], theirs.optimizer[name], **tolerance)


@pytest.mark.gpu
@pytest.mark.seeds(range(6))
@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_fbgemms_cuda_kernel_equals_torch_kernel(name: str, seed: int) -> None:
    kind, device = SPARSE_OPTIMIZERS[name], torch.device("cuda")
    options = {"weight_decay": 0.1} if seed % 2 and kind.fbgemm.decays else {}
    options |= {"eps": 1e-3} if hasattr(kind, "eps") else {}
    optimizer = kind(lr=0.1, **options)
    work = random_work(seed, optimizer, odd=False)
    ours, fused = (
        TorchLookup(work.group, optimizer, device),
        FusedLookup(work.group, optimizer, device),
    )
    work.fill(ours, fused)
    for _ in range(STEPS):
        routed, grad = work.batch(5), work.grad(5).to(device)
        weights = None if routed.weights is None else routed.weights.to(device)
        for lookup in (ours, fused):
            lookup(GroupIds(routed.ids.to(device), routed.offsets.to(device), weights)).backward(
                grad.clone()
            )
    for mine, theirs in zip(ours.shard_states(), fused.shard_states(), strict=True):
        for state_name, tensor in mine.tensors().items():
            torch.testing.assert_close(tensor, theirs.tensors()[state_name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("load_factor", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_rows_with_a_cache_train_as_rows_on_the_device(name: str, load_factor: float) -> None:
    """A cache far smaller than a batch, one for half of the rows, and one for all; rows read and
    written while it holds some.
    """
    optimizer, device = SPARSE_OPTIMIZERS[name](lr=0.1), torch.device("cuda")
    shard = Shard("t", range(500), range(16), 0)
    slot = Slot(Use(0, 0, "t", "f", 0, 16), shard, 0, 0)
    lookups = []
    for storage in (Storage(), Storage("cached", load_factor)):
        key = replace(
            random_work(0, optimizer, weighted=False).group.key,
            storage=storage,
            width=16 if storage.load_factor else 0,
        )
        lookups.append(FusedLookup(LookupGroup(key, (shard,), (slot,)), optimizer, device))
    generator = torch.Generator().manual_seed(3)
    for step in range(12):
        if step % 4 == 0:  # as a checkpoint that is loaded
            rows = torch.randn(500, 16, generator=generator)
            for lookup in lookups:
                lookup.shard_states()[0].weight.copy_(rows)
        ids, grad = (
            torch.randint(500, (200,), generator=generator).to(device),
            torch.randn(100, 16, generator=generator).to(device),
        )
        routed = GroupIds(ids, torch.arange(0, 201, 2, device=device), None)
        a, b = (lookup(routed) for lookup in lookups)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        a.backward(grad)
        b.backward(grad)
        if step % 3 == 2:  # as a checkpoint that is saved
            for name_, tensor in lookups[0].shard_states()[0].tensors().items():
                torch.testing.assert_close(
                    tensor.cpu(),
                    lookups[1].shard_states()[0].tensors()[name_].cpu(),
                    rtol=1e-4,
                    atol=1e-5,
                )


@pytest.mark.seeds(range(8))
def test_learned_weights_get_the_gradient_that_fbgemm_gives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = RowWiseAdagrad(lr=0.1, max_gradient=0.5 if seed % 2 else None)
    work = random_work(seed, optimizer, weighted=True, odd=False)
    ours, fused = TorchLookup(work.group, optimizer, CPU), FusedLookup(work.group, optimizer, CPU)
    work.fill(ours, fused)
    monkeypatch.setitem(touched_rows._BLOCK_ELEMENTS, "cpu", 64)
    for num_bags in (5, 0, 9):
        routed, grad = work.batch(num_bags), work.grad(num_bags)
        found = []
        for lookup in (ours, fused):
            weights = routed.weights.clone().requires_grad_()
            lookup(GroupIds(routed.ids, routed.offsets, weights)).backward(grad.clone())
            found.append(weights.grad)
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_blocks_of_touched_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(5, optimizer, weighted=True)
    whole, blocks = TorchLookup(work.group, optimizer, CPU), TorchLookup(work.group, optimizer, CPU)
    work.fill(whole, blocks)
    for _ in range(STEPS):
        routed, grad = work.batch(8), work.grad(8)
        whole(routed).backward(grad)
        with monkeypatch.context() as patch:
            patch.setitem(touched_rows._BLOCK_ELEMENTS, "cpu", 16)
            blocks(routed).backward(grad)
    for a, b in zip(whole.shard_states(), blocks.shard_states(), strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-6, atol=1e-7)


def test_two_runs_are_equal_bit_for_bit() -> None:
    optimizer = Adam(0.1)
    runs = []
    for _ in range(2):
        work = random_work(8, optimizer)
        lookup = TorchLookup(work.group, optimizer, CPU)
        work.fill(lookup)
        for _ in range(STEPS):
            lookup(work.batch(9)).backward(work.grad(9))
        runs.append([state.weight.clone() for state in lookup.shard_states()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("num_bags", [0, 3])
def test_a_step_without_ids_counts_and_changes_no_row(num_bags: int) -> None:
    optimizer = Adam(0.1, weight_decay=0.1)
    work = random_work(2, optimizer)
    lookup = TorchLookup(work.group, optimizer, CPU)
    work.fill(lookup)
    before = [state.weight.clone() for state in lookup.shard_states()]
    none = torch.zeros(0, dtype=torch.int64)
    weights = torch.zeros(0) if work.group.key.weighted else None
    out = lookup(
        GroupIds(
            none, torch.zeros(num_bags * len(work.group.slots) + 1, dtype=torch.int64), weights
        )
    )
    assert out.shape == (num_bags, work.group.width) and not out.any()
    out.backward(torch.ones_like(out))
    assert lookup.iteration == 1
    assert all(
        torch.equal(a, state.weight) for a, state in zip(before, lookup.shard_states(), strict=True)
    )


def test_evaluation_is_no_step() -> None:
    work = random_work(2, Adam())
    lookup = TorchLookup(work.group, Adam(), CPU)
    with torch.no_grad():
        assert not lookup(work.batch(3)).requires_grad
    lookup(work.batch(3))
    assert lookup.iteration == 0


@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), RowWiseAdagrad(0.1), LAMB(0.1), LarsSGD(0.1, momentum=0.0, eta=1.0)],
    ids=lambda o: o.name,
)
def test_learning_rate_scales_the_next_update(optimizer: SparseOptimizer) -> None:
    moved = []
    for factor in (1.0, 0.5, 0.0):
        work = random_work(5, optimizer)
        lookup = make_lookup(work.group, optimizer, CPU)
        work.fill(lookup)
        before = [state.weight.clone() for state in lookup.shard_states()]
        lookup.set_learning_rate(0.1 * factor)
        lookup(work.batch(4)).backward(work.grad(4))
        moved.append(
            torch.cat(
                [
                    (state.weight - w).view(-1)
                    for state, w in zip(lookup.shard_states(), before, strict=True)
                ]
            )
        )
    assert moved[0].abs().max() > 1e-3 and not moved[2].any()
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-3, atol=1e-6)


def test_iteration_restored_gives_the_bias_correction_of_the_run_it_came_from() -> None:
    optimizer = Adam(0.1)
    work = random_work(6, optimizer)
    trained, restored = (
        TorchLookup(work.group, optimizer, CPU),
        TorchLookup(work.group, optimizer, CPU),
    )
    work.fill(trained, restored)
    batches = [(work.batch(6), work.grad(6)) for _ in range(STEPS)]
    for routed, grad in batches[:-1]:
        trained(routed).backward(grad)
    for a, b in zip(trained.shard_states(), restored.shard_states(), strict=True):
        for name, tensor in a.tensors().items():
            b.tensors()[name].copy_(tensor)
    restored.iteration = trained.iteration
    for lookup in (trained, restored):
        lookup(batches[-1][0]).backward(batches[-1][1])
    for a, b in zip(trained.shard_states(), restored.shard_states(), strict=True):
        assert torch.equal(a.weight, b.weight)


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
        (LAMB(weight_decay=0.1), False, True),
        (LarsSGD(weight_decay=0.1), False, True),
    ],
    ids=str,
)
def test_kernel_is_fbgemms_where_it_trains_the_optimizer_as_defined(
    optimizer: SparseOptimizer, cpu: bool, cuda: bool
) -> None:
    assert has_fused_kernel(optimizer, "cpu") is cpu and has_fused_kernel(optimizer, "cuda") is cuda
    work = random_work(0, optimizer)
    if not cpu:
        assert isinstance(make_lookup(work.group, optimizer, CPU), TorchLookup)
        with pytest.raises(ConfigError, match="cpu kernel does not train"):
            FusedLookup(work.group, optimizer, CPU)


@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_fbgemms_adam_alone_refuses_float16_on_a_gpu(name: str) -> None:
    optimizer, half = SPARSE_OPTIMIZERS[name](lr=0.1), DataType.FP16
    assert has_fused_kernel(optimizer, "cuda", half) is (name != "adam")
    if name == "adam":
        work = random_work(0, optimizer, half, storage=Storage("host"))
        with pytest.raises(ConfigError, match=r"FP16 tables.*storage 'host'.*Adam on FP32"):
            make_lookup(work.group, optimizer, torch.device("cuda"))


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
    lookup = make_lookup(LookupGroup(group.key, (slots[0].shard,), slots), optimizer, CPU)
    assert isinstance(lookup, kernel)


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_a_step_allocates_by_touched_rows_not_by_table(name: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(0, optimizer, weighted=False)
    shard = Shard("t", range(200_000), range(16), 0)
    group = LookupGroup(work.group.key, (shard,), (replace(work.group.slots[0], shard=shard),))
    lookup = TorchLookup(group, optimizer, CPU)
    routed = GroupIds(torch.tensor([3, 199_999, 3]), torch.tensor([0, 1, 3]), None)
    with torch.profiler.profile(profile_memory=True) as profile:
        lookup(routed).backward(torch.ones(2, 16))
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert 0 < taken < 20_000, f"{taken} bytes for 2 touched rows of a table of {200_000 * 16 * 4}"


def test_rows_outside_of_gpu_memory_need_fbgemms_kernel() -> None:
    optimizer = SGD(weight_decay=0.1)
    for storage in (Storage("host"), Storage("cached", 0.2)):
        with pytest.raises(ConfigError, match=f"storage '{storage.label}'"):
            make_lookup(
                random_work(0, optimizer, storage=storage).group, optimizer, torch.device("cuda")
            )


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
        make_lookup(group, SGD(), torch.device("cuda"))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 18])
@pytest.mark.parametrize("data_type", DataType, ids=lambda t: t.value)
def test_means_over_an_odd_row_are_over_its_own_columns(width: int, data_type: DataType) -> None:
    optimizer = RowWiseAdagrad(0.5, eps=1e-6)
    key = replace(random_work(0, optimizer, data_type, weighted=False).group.key, odd=True)
    shard = Shard("t", range(3), range(width), 0)
    lookup = make_lookup(
        LookupGroup(key, (shard,), (Slot(Use(0, 0, "t", "f", 0, width), shard, 0, 0),)),
        optimizer,
        CPU,
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
