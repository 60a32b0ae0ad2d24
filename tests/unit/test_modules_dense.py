"""MLP, pairwise dots and cross networks against their formulas, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError, ShapeError
from rayrec.layout import DataType
from rayrec.modules import (
    MLP,
    CrossNet,
    KTRegroupAsDict,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    Perceptron,
    SwishLayerNorm,
    VectorCrossNet,
    pairwise_dots,
)
from rayrec.sparse import KeyedTensor


def pairwise_dots_reference(features):
    """`pairwise_dots` with autograd's backward."""
    rows, cols = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
    return torch.bmm(features, features.transpose(1, 2))[:, rows, cols]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("features", [1, 2, 7])
def test_pairwise_dots_and_their_gradient_equal_autograd(rows, features):
    generator = torch.Generator().manual_seed(features)
    inputs = torch.rand(
        rows, features, 4, dtype=torch.float64, generator=generator, requires_grad=True
    )
    got, want = pairwise_dots(inputs), pairwise_dots_reference(inputs)
    assert got.shape == (rows, features * (features - 1) // 2)
    torch.testing.assert_close(got, want)
    scale = torch.rand(got.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad((got * scale).sum(), inputs),
        torch.autograd.grad((want * scale).sum(), inputs),
    )


def test_pairwise_dots_pass_gradcheck():
    inputs = torch.rand(
        2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradcheck(pairwise_dots, (inputs,))


def test_mlp_is_linear_layers_and_activations():
    mlp = MLP(3, [5, 2], activation="sigmoid")
    assert list(mlp.state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._linear.bias",
        "_mlp.1._linear.weight",
        "_mlp.1._linear.bias",
    ]
    x = torch.rand(4, 3)
    first, second = mlp._mlp[0]._linear, mlp._mlp[1]._linear
    assert torch.equal(mlp(x), torch.sigmoid(second(torch.sigmoid(first(x)))))
    assert MLP(3, [])(x) is x and MLP(3, [2], bias=False)._mlp[0]._linear.bias is None
    last = MLP(3, [5, 2], activation_on_last=False)
    assert torch.equal(last(x), last._mlp[1]._linear(torch.relu(last._mlp[0]._linear(x))))


def test_activation_may_be_a_function_a_module_or_a_class():
    shared = nn.PReLU()
    assert MLP(3, [4, 4], activation=shared)._mlp[1]._activation_fn is shared
    own = MLP(3, [4, 4], activation=nn.PReLU)
    assert (
        own._mlp[0]._activation_fn is not own._mlp[1]._activation_fn
        and len(list(own.parameters())) == 6
    )
    assert Perceptron(3, 2, activation=torch.tanh)(torch.zeros(1, 3)).abs().max() < 1
    made = MLP(3, [4, 4], activation=lambda: SwishLayerNorm(4))
    named = MLP(3, [4, 4], activation="swish_layernorm", activation_on_last=False)
    assert len(list(made.parameters())) == 8 and len(list(named.parameters())) == 6
    named.load_state_dict(made.state_dict(), strict=False)
    x = torch.rand(2, 3)
    first = named._mlp[0]._linear(x)
    wanted = named._mlp[1]._linear(first * nn.functional.layer_norm(first, [4]).sigmoid())
    torch.testing.assert_close(named(x), wanted)
    with pytest.raises(ConfigError, match="'gelu' is unknown"):
        MLP(3, [2], activation="gelu")


def test_reset_draws_new_values():
    mlp = MLP(3, [5, 2])
    before = [p.clone() for p in mlp.parameters()]
    mlp.reset_parameters()
    assert not any(torch.equal(p, q) for p, q in zip(mlp.parameters(), before, strict=True))


@pytest.mark.parametrize("rows", [0, 4])
def test_cross_net_equals_its_formula(rows):
    net = CrossNet(6, 3)
    assert [p.shape for p in net.kernels] == [(6, 6)] * 3 and [p.shape for p in net.bias] == [
        (6, 1)
    ] * 3
    nn.init.uniform_(net.bias[0])
    x0 = x = torch.rand(rows, 6)
    for kernel, bias in zip(net.kernels, net.bias, strict=True):
        x = x0 * (x @ kernel.T + bias.T) + x
    torch.testing.assert_close(net(x0), x)


@pytest.mark.parametrize("rows", [0, 4])
def test_low_rank_cross_net_equals_its_formula(rows):
    net = LowRankCrossNet(6, 3, low_rank=2)
    nn.init.uniform_(net.bias[1])
    x0 = x = torch.rand(rows, 6)
    for wide, narrow, bias in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        x = x0 * (x @ narrow.T @ wide.T + bias) + x
    torch.testing.assert_close(net(x0), x)
    assert not any(p.is_meta for p in net.parameters()) and all(
        p.is_meta for p in LowRankCrossNet(6, 1, device="meta").parameters()
    )
    with pytest.raises(ConfigError, match="low_rank=0"):
        LowRankCrossNet(6, 3, low_rank=0)


def test_pairwise_dots_train_under_autocast() -> None:
    rows = torch.randn(4, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        pairwise_dots(rows * 1.0).float().sum().backward()
    exact = torch.autograd.grad(pairwise_dots(rows).sum(), rows)[0]
    torch.testing.assert_close(rows.grad, exact, rtol=0.02, atol=0.05)  # bfloat16 keeps 8 bits


def test_pairwise_dots_have_a_second_derivative() -> None:
    inputs = torch.rand(
        2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradgradcheck(pairwise_dots, (inputs,))


@pytest.mark.parametrize("rows", [0, 4])
def test_vector_cross_net_equals_its_formula(rows):
    net = VectorCrossNet(6, 3)
    assert [p.shape for p in net.kernels] == [p.shape for p in net.bias] == [(6, 1)] * 3
    nn.init.uniform_(net.bias[0])
    x0 = x = torch.rand(rows, 6)
    for kernel, bias in zip(net.kernels, net.bias, strict=True):
        x = x0 * (x * kernel.T).sum(1, keepdim=True) + bias.T + x
    torch.testing.assert_close(net(x0), x)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("rows", [0, 4])
def test_mixture_of_cross_nets_equals_its_formula(rows, experts):
    net = LowRankMixtureCrossNet(6, 2, experts, low_rank=2, activation=torch.tanh)
    nn.init.uniform_(net.bias[1])
    x0 = x = torch.rand(rows, 6)
    for layer in range(2):
        parts = []
        for k in range(experts):
            inner = torch.tanh(x @ net.V_kernels[layer][k].T)
            inner = torch.tanh(inner @ net.C_kernels[layer][k].T)
            parts.append(x0 * (inner @ net.U_kernels[layer][k].T + net.bias[layer].T))
        shares = (
            [torch.ones(rows, 1)]
            if experts == 1
            else torch.cat([gate(x) for gate in net.gates], 1).softmax(1).split(1, 1)
        )
        x = sum(part * share for part, share in zip(parts, shares, strict=True)) + x
    torch.testing.assert_close(net(x0), x)
    names = {"U_kernels.0", "V_kernels.0", "C_kernels.0", "bias.0"} | (
        {"gates.0.weight"} if experts > 1 else set()
    )
    assert names <= set(net.state_dict()) and (experts > 1) == any(
        name.startswith("gates") for name in net.state_dict()
    )


@pytest.mark.parametrize(
    "make",
    [lambda: LowRankMixtureCrossNet(6, 1, 0), lambda: LowRankMixtureCrossNet(6, 1, low_rank=0)],
)
def test_a_mixture_needs_experts_and_a_rank(make):
    with pytest.raises(ConfigError, match="=0 must be at least 1"):
        make()


@pytest.mark.parametrize(
    "make", [VectorCrossNet, lambda *a, device: LowRankMixtureCrossNet(*a, 2, device=device)]
)
def test_cross_nets_may_begin_on_the_meta_device(make):
    net = make(6, 2, device="meta")
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    net.reset_parameters()
    assert all(p.isfinite().all() for p in net.parameters()) and not net.bias[0].any()


@pytest.mark.parametrize("dims", [4, [3, 4], torch.Size([4])])
def test_swish_layer_norm_gates_its_input(dims):
    module, x = SwishLayerNorm(dims), torch.rand(2, 3, 4)
    over = (-1,) if dims != [3, 4] else (-2, -1)
    normed = (x - x.mean(over, keepdim=True)) / (
        x.var(over, unbiased=False, keepdim=True) + 1e-5
    ).sqrt()
    torch.testing.assert_close(module(x), x / (1 + (-normed).exp()))
    assert list(module.state_dict()) == ["norm.0.weight", "norm.0.bias"]


def test_regroup_as_a_module():
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(3, 3))
    module = KTRegroupAsDict([["b"], [], ["b", "a"]], ["x", "y", "z"], multi_device=True)
    found = module([kt])
    assert (
        list(found) == ["x", "y", "z"]
        and torch.equal(found["z"], kt.values()[:, [1, 2, 0]])
        and found["y"].shape == (3, 0)
    )
    assert (
        KTRegroupAsDict([["a"]], ["x"], emb_dtype=DataType.FP16)([kt])["x"].dtype == torch.float16
    )
    with pytest.raises(ShapeError):
        KTRegroupAsDict([["a"]], ["x", "y"])
