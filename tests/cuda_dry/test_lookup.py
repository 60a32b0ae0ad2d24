"""FBGEMM's CUDA lookups equal the CPU's lookup in torch, for every optimizer and every storage."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.distributed.kernels import lookup as lookup_module
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup, has_fused_kernel, make_lookup
from rayrec.distributed.kernels.torch_lookup import TorchLookup
from rayrec.layout import DataType, Storage
from rayrec.optim import SPARSE_OPTIMIZERS, SparseOptimizer
from tests.cuda_dry import runtime
from tests.cuda_dry.models import CPU, GPU, STORAGES
from tests.optim_reference import FBGEMM_OPTIMIZERS, random_work

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


def random_options(name: str, rng: random.Random) -> SparseOptimizer:
    """An optimizer with options that FBGEMM's CUDA kernels know."""
    options: dict[str, float | str] = {}
    kind = SPARSE_OPTIMIZERS[name]
    assert kind.fbgemm is not None
    if hasattr(kind, "eps"):
        options["eps"] = rng.choice([1e-8, 1e-3])
    if kind.fbgemm.decays and rng.random() < 0.5:
        mode = rng.choice(kind.fbgemm.decays)
        options |= {"weight_decay": 0.1, "weight_decay_mode": mode}
    if hasattr(kind, "beta1"):
        options |= {"beta1": rng.choice([0.9, 0.5]), "beta2": rng.choice([0.999, 0.9])}
    if rng.random() < 0.3:
        options["max_gradient"] = 0.5
    return kind(lr=0.1, **options)  # type: ignore[arg-type]


def on_gpu(routed: GroupIds) -> GroupIds:
    weights = None if routed.weights is None else routed.weights.to(GPU)
    return GroupIds(routed.ids.to(GPU), routed.offsets.to(GPU), weights)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_lookups_train_as_on_the_cpu(name: str, storage: str, seed: int) -> None:
    rng = random.Random(f"{name} {storage} {seed}")
    optimizer = random_options(name, rng)
    data_type = rng.choice([DataType.FP32, DataType.FP32, DataType.FP16])
    if name == "adam":
        data_type = DataType.FP32
    work = random_work(seed, optimizer, data_type, storage=STORAGES[storage], odd=False)
    fused = make_lookup(work.group, GPU)
    assert isinstance(fused, FusedLookup)
    on_device = replace(work.group, key=replace(work.group.key, storage=Storage()))
    plain = TorchLookup(on_device, CPU)
    work.fill(plain, fused)
    tolerance = TOLERANCE if data_type is DataType.FP32 else {"rtol": 4e-3, "atol": 4e-3}
    for step in range(4):
        routed, grad = work.batch(3), work.grad(3)
        wanted, got = plain(routed), fused(on_gpu(routed))
        torch.testing.assert_close(got.cpu(), wanted, **tolerance)
        wanted.backward(grad)
        got.backward(grad.to(GPU))
        if step == 1:
            for lookup in (plain, fused):
                lookup.set_learning_rate(0.03)
            with torch.no_grad():  # evaluation is no step
                fused(on_gpu(routed))
    assert fused.iteration == (4 if optimizer.counts_updates else 0)
    for mine, theirs in zip(fused.shard_states(), plain.shard_states(), strict=True):
        assert mine.weight.is_cuda
        for state, tensor in mine.tensors().items():
            torch.testing.assert_close(tensor.cpu(), theirs.tensors()[state], **tolerance)


@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_learned_weights_get_their_gradient(name: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(1, optimizer, weighted=True, odd=False)
    plain, fused = TorchLookup(work.group, CPU), FusedLookup(work.group, GPU)
    work.fill(plain, fused)
    routed, grad = work.batch(4), work.grad(4)
    assert routed.weights is not None
    mine, theirs = on_gpu(routed), routed
    for ids in (mine, theirs):
        assert ids.weights is not None
        ids.weights.requires_grad_()
    fused(mine).backward(grad.to(GPU))
    plain(theirs).backward(grad)
    got, wanted = (ids.weights.grad for ids in (mine, theirs))  # type: ignore[union-attr]
    torch.testing.assert_close(got.cpu(), wanted, **TOLERANCE)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_fbgemm_takes_float16_tables_where_rayrec_says_so(name: str) -> None:
    """Fails when FBGEMM's Adam has learned it, or when another one has not."""
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(0, optimizer, DataType.FP16, weighted=False, odd=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_module, "has_fused_kernel", lambda *_: True)
        fused = FusedLookup(work.group, GPU)
    pooled = fused(on_gpu(work.batch(3)))
    if has_fused_kernel(optimizer, "cuda", DataType.FP16):
        pooled.backward(work.grad(3).to(GPU))
        return
    with pytest.raises(RuntimeError, match="scalar type Float, but found Half"):
        pooled.backward(work.grad(3).to(GPU))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_a_step_of_the_lookup_does_not_stop_the_host(name: str, storage: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(2, optimizer, storage=STORAGES[storage], odd=False)
    lookup = make_lookup(work.group, GPU)
    routed, grad = on_gpu(work.batch(3)), work.grad(3).to(GPU)
    lookup(routed).backward(grad)  # the first step reads the count of earlier ones
    with runtime.syncs() as found:
        lookup(routed).backward(grad)
    assert not found


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "rowwise_adagrad"])
def test_the_kernel_in_torch_trains_on_the_gpu_as_on_the_cpu(name: str) -> None:
    """What FBGEMM has no kernel for: the norm of a row is bounded."""
    optimizer = replace(SPARSE_OPTIMIZERS[name](lr=0.1), max_row_norm=0.5)
    for seed in range(4):
        work = random_work(seed, optimizer, odd=False)
        mine, theirs = make_lookup(work.group, GPU), TorchLookup(work.group, CPU)
        assert isinstance(mine, TorchLookup)
        work.fill(mine, theirs)
        for _ in range(3):
            routed, grad = work.batch(4), work.grad(4)
            got, wanted = mine(on_gpu(routed)), theirs(routed)
            torch.testing.assert_close(got.cpu(), wanted, **TOLERANCE)
            got.backward(grad.to(GPU))
            wanted.backward(grad)
        for a, b in zip(mine.shard_states(), theirs.shard_states(), strict=True):
            torch.testing.assert_close(a.weight.cpu(), b.weight, **TOLERANCE)
