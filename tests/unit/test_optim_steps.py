"""Steps of a lookup kernel: blocks, repeated runs, no ids, evaluation, learning rates."""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed.kernels import touched_rows
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import make_lookup
from rayrec.distributed.kernels.torch_lookup import TorchLookup
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adam,
    LarsSGD,
    RowWiseAdagrad,
    SparseOptimizer,
)
from tests.optim_reference import random_work
from tests.unit.optim_worlds import CPU, STEPS


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_blocks_of_touched_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(5, optimizer, weighted=True)
    whole, blocks = TorchLookup(work.group, CPU), TorchLookup(work.group, CPU)
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
        lookup = TorchLookup(work.group, CPU)
        work.fill(lookup)
        for _ in range(STEPS):
            lookup(work.batch(9)).backward(work.grad(9))
        runs.append([state.weight.clone() for state in lookup.shard_states()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("num_bags", [0, 3])
def test_a_step_without_ids_counts_and_changes_no_row(num_bags: int) -> None:
    optimizer = Adam(0.1, weight_decay=0.1)
    work = random_work(2, optimizer)
    lookup = TorchLookup(work.group, CPU)
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
    lookup = TorchLookup(work.group, CPU)
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
        lookup = make_lookup(work.group, CPU)
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
    trained, restored = TorchLookup(work.group, CPU), TorchLookup(work.group, CPU)
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
