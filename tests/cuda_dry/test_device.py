"""The stand-in device itself: what is an error on a GPU is one here, and host syncs are counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.cuda_dry import runtime
from tests.cuda_dry.device import native_kernel


def test_memory_is_torchs_own() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    assert x.device == torch.device("cuda", 0) and x.storage_offset() == 0


def test_operators_compute_as_on_the_cpu() -> None:
    x = torch.arange(12.0).view(3, 4)
    y = x.cuda().t().contiguous() @ x.cuda() + 1
    assert y.is_cuda and torch.equal(y.cpu(), x.t() @ x + 1)
    view = y[1:]
    view.mul_(2)
    assert torch.equal(y[1:].cpu(), 2 * (x.t() @ x + 1)[1:])
    out = torch.empty(0, device="cuda")
    torch.cat([y, y], out=out)
    assert out.shape == (8, 4) and torch.equal(out[4:], y)


def test_an_index_of_the_host_is_read_before_another_thread_takes_its_memory() -> None:
    rows = 4096

    def choose(seed: int) -> int:
        rng = torch.Generator().manual_seed(seed)
        values = torch.arange(float(rows))
        there, wrong = values.cuda(), 0
        for _ in range(2000):
            mask = torch.rand(rows, generator=rng) < 0.5
            wrong += not torch.equal(there[mask].cpu(), values[mask])
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(choose, range(4))) == 0


def test_a_gradient_flows() -> None:
    layer = torch.nn.Linear(4, 2).cuda()
    layer(torch.ones(3, 4, device="cuda")).relu().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.is_cuda


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match=r"aten::add.*a CPU tensor of shape \(3,\)"):
        torch.ones(3, device="cuda") + torch.ones(3)
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
    with pytest.raises(TypeError, match="can't convert cuda"):
        torch.ones(3, device="cuda").numpy()


def test_a_kernel_that_nobody_computes_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(64, device="cuda")
    with pytest.raises(RuntimeError, match="operation not supported"):
        torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(x.view(8, 8), 4)
    assert "no kernel can run here" in capfd.readouterr().err


def test_memory_that_was_not_written_is_not_a_number() -> None:
    assert torch.empty(1 << 20, device="cuda:3").isnan().all()


SYNCING = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.ones(3).to("cuda"),
    "made from a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "an index on the host": lambda x: x[torch.tensor([1])],
    "an index as a list": lambda x: x[[1]],
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats of unknown sum": lambda x: torch.repeat_interleave(
        torch.ones(3, dtype=torch.int64, device="cuda")
    ),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
FREE = {
    "a sum": lambda x: x.sum(),
    "from page-locked memory": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "a small copy": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "an index on the device": lambda x: x[torch.ones(1, dtype=torch.int64, device="cuda")],
    "repeats of known sum": lambda x: x.repeat_interleave(
        torch.ones(3, dtype=torch.int64, device="cuda"), output_size=3
    ),
    "waiting for an event on the device": lambda x: torch.cuda.current_stream().wait_event(
        torch.cuda.Event()
    ),
}


@pytest.mark.parametrize("what", SYNCING)
def test_what_stops_the_host_is_counted(what: str) -> None:
    x = torch.ones(3, device="cuda")
    with runtime.syncs() as found:
        SYNCING[what](x)
    assert len(found) == 1, found


@pytest.mark.parametrize("what", FREE)
def test_what_does_not_is_not(what: str) -> None:
    x = torch.ones(3, device="cuda")
    with runtime.syncs() as found:
        FREE[what](x)
    assert not found


def test_a_launch_is_allowed_only_inside_the_block() -> None:
    name = "aten::add.Tensor"  # replaced: what is there now computes
    with runtime.launches_allowed():
        pass
    assert torch.equal(
        native_kernel(name)(torch.ones(2, device="cuda"), torch.ones(2, device="cuda")).cpu(),
        torch.full((2,), 2.0),
    )
