"""FBGEMM's CUDA operators take what rayrec passes, by the shapes and devices of FakeTensorMode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup
from rayrec.optim import SPARSE_OPTIMIZERS
from tests.cuda_dry.models import GPU, STORAGES
from tests.optim_reference import FBGEMM_OPTIMIZERS, random_work


class _Count:
    """Stands for the module's count of steps on the CPU, whose value no fake tensor has."""

    def cpu(self) -> _Count:
        return self

    def add_(self, one: int) -> _Count:
        return self

    def fill_(self, value: int) -> _Count:
        return self

    def item(self) -> int:
        return 1

    def __int__(self) -> int:
        return 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", FBGEMM_OPTIMIZERS)
def test_operators_take_what_rayrec_passes(name: str, storage: str, weighted: bool) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    work = random_work(0, optimizer, weighted=weighted, storage=STORAGES[storage], odd=False)
    routed = work.batch(3)
    with FakeTensorMode() as mode:

        def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
            return mode.from_tensor(tensor).to(GPU)

        lookup = FusedLookup(work.group, GPU)
        lookup.kernel._buffers.pop("iter_cpu", None)
        lookup.kernel.__dict__["iter_cpu"] = _Count()
        weights = None if routed.weights is None else on_gpu(routed.weights).requires_grad_()
        pooled = lookup(GroupIds(on_gpu(routed.ids), on_gpu(routed.offsets), weights))
        assert pooled.shape == (3, work.group.width)
        assert pooled.device.type == "cuda" and pooled.dtype == torch.float32
        pooled.sum().backward()
        if weights is not None:
            assert weights.grad is not None and weights.grad.shape == weights.shape
