"""The torch kernel trains by the formulas of every optimizer, and equals FBGEMM's kernel and
torch's optimizers where they overlap.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.distributed.kernels import touched_rows
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup
from rayrec.distributed.kernels.torch_lookup import TorchLookup
from rayrec.distributed.program.groups import LookupGroup, Slot, Use
from rayrec.layout import DataType, Shard, Storage
from rayrec.optim import SGD, SPARSE_OPTIMIZERS, Adagrad, Adam, RMSprop, RowWiseAdagrad
from tests.optim_reference import (
    FBGEMM_OPTIMIZERS,
    ReferenceTable,
    pooled,
    random_optimizer,
    random_work,
    summed_gradients,
)
from tests.unit.optim_worlds import CPU, STEPS

# float32 sums and four updates against float64; Adagrad and Adam divide by roots of small sums
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.seeds(range(15))
@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_lookup_and_update_equal_the_formula(name: str, seed: int) -> None:
    optimizer = random_optimizer(name, random.Random(f"{name}{seed}"))
    work = random_work(seed, optimizer)
    lookup = TorchLookup(work.group, CPU)
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
    lookup = TorchLookup(work.group, CPU)
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
    lookup = TorchLookup(work.group, CPU)
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
    ours, fused = TorchLookup(work.group, CPU), FusedLookup(work.group, CPU)
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
    ours, fused = TorchLookup(work.group, device), FusedLookup(work.group, device)
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
        lookups.append(FusedLookup(LookupGroup(key, (shard,), (slot,)), device))
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
    ours, fused = TorchLookup(work.group, CPU), FusedLookup(work.group, CPU)
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
