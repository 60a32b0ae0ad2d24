"""`linear` equals torch's in both of its kernels, with gradients, and leaves to torch what is not a
plain float32 product on CPU.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from rayrec.modules import MLP, CrossNet, LowRankCrossNet
from rayrec.modules import linear as module
from rayrec.modules.linear import FastLinear, linear, uses_onednn

# float32 sums of up to 1000 products of size 1/sqrt(columns), in two orders
SUMS = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def any_processor_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN is taken here whatever the processor, and for small matrices, too."""
    monkeypatch.setattr(module, "_is_amd", lambda: True)
    monkeypatch.setattr(module, "_SMALL", 1)


def inputs(seed: int, rows: int, wide: int, out: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randn(rows, wide, generator=generator),
        torch.randn(out, wide, generator=generator) / wide**0.5,
    )
    return (
        x.requires_grad_(),
        weight.requires_grad_(),
        torch.randn(out, generator=generator).requires_grad_(),
    )


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shape", [(1024, 13, 512), (1024, 415, 96), (7, 5, 3), (1, 40, 2), (0, 4, 8), (300, 1, 2)]
)
def test_linear_and_all_gradients_equal_torchs(
    shape: tuple[int, int, int], biased: bool, relu: bool
) -> None:
    x, weight, bias = inputs(1, *shape)
    leaves = (x, weight, bias) if biased else (x, weight)
    assert uses_onednn(x, weight) is (shape[0] > 0)
    got, want = linear(*leaves, relu=relu), functional.linear(*leaves)
    if relu:
        want = want.relu()
    torch.testing.assert_close(got, want, **SUMS)
    scale = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    for a, b in zip(
        torch.autograd.grad((got * scale).sum(), leaves),
        torch.autograd.grad((want * scale).sum(), leaves),
        strict=True,
    ):
        assert a.is_contiguous()
        # the weight's gradient sums over the rows
        torch.testing.assert_close(a, b, **SUMS | {"atol": 1e-4})
    with torch.no_grad():
        torch.testing.assert_close(linear(*leaves, relu=relu), want, **SUMS)


def test_only_the_gradients_asked_for_are_made() -> None:
    x, weight, bias = inputs(0, 16, 8, 4)
    linear(x.detach(), weight, bias).sum().backward()
    assert x.grad is None and weight.grad is not None and bias.grad is not None
    frozen = linear(x, weight.detach(), bias.detach()).sum()
    assert torch.autograd.grad(frozen, x)[0].shape == x.shape


def test_a_strided_input_and_gradient_are_read_correctly() -> None:
    x, weight, bias = inputs(3, 8, 16, 6)
    strided, turned = torch.cat((x, x), 1)[:, 16:], x.detach().t().contiguous().t()
    torch.testing.assert_close(
        linear(strided, weight, bias), functional.linear(x, weight, bias), **SUMS
    )
    torch.testing.assert_close(
        linear(turned, weight, bias), functional.linear(x, weight, bias), **SUMS
    )
    # the gradient of a sum has strides 0
    expanded = torch.autograd.grad(linear(x, weight, bias).sum(), (x, weight))
    torch.testing.assert_close(
        expanded, torch.autograd.grad(functional.linear(x, weight, bias).sum(), (x, weight)), **SUMS
    )


def test_second_derivatives_equal_torchs() -> None:
    found = []
    fused = functools.partial(linear, relu=True)
    for function in (fused, lambda *leaves: functional.linear(*leaves).relu()):
        x, weight, bias = inputs(4, 6, 5, 3)
        first = torch.autograd.grad(function(x, weight, bias).square().sum(), x, create_graph=True)[
            0
        ]
        found.append(torch.autograd.grad(first.square().sum(), (x, weight, bias)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **SUMS)


@pytest.mark.parametrize("processor", [True, False])
def test_what_is_not_a_plain_product_goes_to_torch(
    processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_amd", lambda: processor)
    x, weight, bias = (t.detach() for t in inputs(5, 6, 5, 3))
    assert uses_onednn(x, weight) is processor
    for a, b in (
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x.view(2, 3, 5), weight),
        (x.to("meta"), weight.to("meta")),
    ):
        assert not uses_onednn(a, b)
        assert linear(a, b).shape == functional.linear(a, b).shape
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    each = torch.vmap(lambda row: linear(row.unsqueeze(0), weight, bias))(x).squeeze(1)
    torch.testing.assert_close(each, functional.linear(x, weight, bias), **SUMS)
    jacobian = torch.func.jacrev(lambda rows: linear(rows, weight, bias).sum(0))(x)
    torch.testing.assert_close(jacobian, weight.unsqueeze(1).expand(3, 6, 5), **SUMS)


def test_a_small_product_stays_in_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(6, 64, 8, 4)
    monkeypatch.setattr(module, "_SMALL", 64 * 8 * 4 + 1)
    assert not uses_onednn(x, weight) and torch.equal(
        linear(x, weight, bias), functional.linear(x, weight, bias)
    )


def test_the_kernel_does_not_depend_on_time_or_history() -> None:
    x, weight, bias = inputs(7, 512, 64, 32)
    runs = [
        torch.autograd.grad(linear(x, weight, bias).square().sum(), (x, weight, bias))
        for _ in range(3)
    ]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize(
    "make",
    [lambda: MLP(20, [33, 17, 2]), lambda: CrossNet(20, 3), lambda: LowRankCrossNet(20, 3, 8)],
)
def test_modules_train_as_with_torchs_product(make, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (1, 1 << 62):
        monkeypatch.setattr(module, "_SMALL", limit)
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(64, 20)).square().mean().backward()
            optimizer.step()
        found.append(list(net.parameters()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_fast_linear_is_a_linear_layer() -> None:
    torch.manual_seed(0)
    fast = FastLinear(6, 3)
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    assert isinstance(fast, nn.Linear) and list(fast.state_dict()) == list(plain.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(fast.parameters(), plain.parameters(), strict=True)
    )
    x, seen = torch.randn(50, 6), []
    torch.testing.assert_close(fast.forward_relu(x), plain(x).relu(), **SUMS)
    fast.register_forward_hook(lambda _, inputs, out: seen.append(out))
    # a hook sees the layer's own output
    assert (fast.forward_relu(x) >= 0).all() and (seen[0] < 0).any()


def test_an_mlp_runs_whatever_takes_the_place_of_its_layer() -> None:
    mlp = MLP(6, [3])
    mlp._mlp[0]._linear = nn.Linear(6, 3)
    x = torch.randn(50, 6)
    assert torch.equal(mlp(x), mlp._mlp[0]._linear(x).relu())
