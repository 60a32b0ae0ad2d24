"""Specs of sparse optimizers: their values, the marks on tables, and their page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, Topology
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adagrad,
    Adam,
    DenseRowWiseAdagrad,
    LarsSGD,
    RowWiseAdagrad,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    optimizer_of,
    sparse_optimizer,
)
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_an_optimizer_is_rebuilt_from_its_name_and_constants(name: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.3, weight_decay=0.1, max_row_norm=2.0)
    assert sparse_optimizer(name, **optimizer.hyperparameters) == optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(-1.0),
        lambda: SGD(math.nan),
        lambda: SGD(weight_decay=-0.1),
        lambda: SGD(max_row_norm=0.0),
        lambda: SGD(1e39),
        lambda: SGD(weight_decay=10**400),
        lambda: RowWiseAdagrad(eps=-1e-8),
        lambda: Adam(eps=math.nan),
        lambda: Adam(beta1=1.0),
        lambda: LAMB(beta2=1.5),
        lambda: LarsSGD(momentum=1.0),
        lambda: Adagrad(weight_decay_mode="L1"),
        lambda: sparse_optimizer("adamw", 0.1),
        lambda: sparse_optimizer("sgd", 0.1, eps=1e-3),
        lambda: WarmupStage(max_iters=0),
        lambda: WarmupStage(value=-1.0),
        lambda: WarmupStage(sgdr_period=0),
        lambda: WarmupStage(WarmupPolicy.INTERPOLATE, 4, end_value=1.0),
        lambda: WarmupStage(
            WarmupPolicy.INTERPOLATE, 4, start_interpolating_iters=4, end_value=1.0
        ),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


def collection() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def sharded(module: EmbeddingBagCollection, **options: Any) -> DistributedModelParallel:
    plan = manual_plan(module.embedding_bag_configs(), "table_wise", Topology.local(1))
    return DistributedModelParallel(module, plan=plan, seed=1, **options)


@pytest.mark.parametrize(
    ("cls", "kwargs", "want"),
    [
        (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3}, RowWiseAdagrad(0.2, eps=1e-3)),
        (Adam, {"lr": 0.2, "betas": (0.5, 0.6)}, Adam(0.2, beta1=0.5, beta2=0.6)),
        (torch.optim.SGD, {"lr": 0.2}, SGD(0.2)),
        (torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.1}, SGD(0.2, weight_decay=0.1)),
        (torch.optim.Adagrad, {}, Adagrad(0.01, eps=1e-10)),
        (
            torch.optim.Adam,
            {"weight_decay": 0.1},
            Adam(1e-3, weight_decay=0.1, weight_decay_mode="l2"),
        ),
        (
            torch.optim.AdamW,
            {"betas": (0.5, 0.6)},
            Adam(1e-3, beta1=0.5, beta2=0.6, weight_decay=0.01),
        ),
        (torch.optim.SparseAdam, {"lr": 0.2}, Adam(0.2, weight_decay_mode="l2")),
        (DenseRowWiseAdagrad, {"lr": 0.2}, RowWiseAdagrad(0.2, eps=1e-10)),
    ],
    ids=str,
)
def test_marks_are_read_back_as_specs(cls, kwargs, want) -> None:
    module = collection()
    apply_optimizer_in_backward(cls, module.embedding_bags["t0"].parameters(), kwargs)
    assert optimizer_of(module.embedding_bags["t0"].weight) == want
    assert optimizer_of(module.embedding_bags["t1"].weight) is None
    apply_optimizer_in_backward(cls, module, kwargs)  # the same again is no contradiction
    assert optimizer_of(module.embedding_bags["t1"].weight) == want


@pytest.mark.parametrize(
    ("cls", "kwargs", "match"),
    [
        (torch.optim.NAdam, {}, "no counterpart.*PartialRowWiseAdam"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum=0.9"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.SGD, {"rate": 0.1}, "rate"),
        (RowWiseAdagrad, {"rate": 0.1}, "rate"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(cls, kwargs, match) -> None:
    with pytest.raises(ConfigError, match=match):
        apply_optimizer_in_backward(cls, collection(), kwargs)


@pytest.mark.parametrize(
    ("cls", "kwargs", "want"),
    [
        (torch.optim.SGD, {"lr": 0.5}, SGD(0.5)),
        (torch.optim.AdamW, {"lr": 0.5}, Adam(0.5, weight_decay=0.01)),
        (DenseRowWiseAdagrad, {"lr": 0.5, "eps": 0.1}, RowWiseAdagrad(0.5, eps=0.1)),
    ],
)
def test_marks_of_torch_decide_how_a_sharded_table_trains(cls, kwargs, want) -> None:
    marked, told = collection(), collection()
    _apply_optimizer_in_backward(cls, marked.parameters(), kwargs)
    first, second = sharded(marked), sharded(told, sparse_optimizer=want)
    assert first.sparse_optimizers == {"t0": want, "t1": want}
    ids = KeyedJaggedTensor(["f0", "f1"], torch.arange(4), lengths=torch.full((2,), 2))
    for model in (first, second):
        model(ids).values().square().sum().backward()
    for mine, theirs in zip(first.shard_states(), second.shard_states(), strict=True):
        assert torch.equal(mine.weight, theirs.weight)


def test_marks_of_torch_without_a_counterpart_are_refused_by_name() -> None:
    module = collection()
    _apply_optimizer_in_backward(torch.optim.NAdam, [module.embedding_bags["t0"].weight], {})
    with pytest.raises(ConfigError, match="NAdam has no counterpart"):
        sharded(module)


def test_marks_of_torch_that_contradict_each_other_or_ours_are_refused() -> None:
    module = collection()
    weights = [bag.weight for bag in module.embedding_bags.values()]
    apply_optimizer_in_backward(Adam, weights[:1], {"lr": 0.1})
    _apply_optimizer_in_backward(torch.optim.SGD, weights, {"lr": 0.1})
    _apply_optimizer_in_backward(torch.optim.SGD, weights[1:], {"lr": 0.2})
    for weight in weights:
        with pytest.raises(ConfigError, match="Mark each table once"):
            optimizer_of(weight)


def test_two_different_marks_on_one_table_are_refused() -> None:
    module = collection()
    apply_optimizer_in_backward(SGD, module, {"lr": 0.1})
    with pytest.raises(ConfigError, match="marked with SGD"):
        apply_optimizer_in_backward(Adam, module, {"lr": 0.1})


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_the_page_about_optimizers_has_its_line_and_state(name: str) -> None:
    kind = SPARSE_OPTIMIZERS[name]
    widths = list(kind.state_widths.values())
    rows, elements = widths.count("row"), widths.count("element")
    parts = ["D" if elements == 1 else f"{elements} D"] * bool(elements) + [str(rows)] * bool(rows)
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}(")]
    assert [cell.strip() for cell in line.split("|")][2:4] == [
        f"`{name}`",
        " + ".join(parts) or "none",
    ]
