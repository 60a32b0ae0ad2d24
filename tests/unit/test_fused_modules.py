"""Fused collections against the plain ones with torch's dense optimizers, and their names, copies
and sharding.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rayrec
from rayrec.distributed import (
    DistributedModelParallel,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
    table_configs,
)
from rayrec.errors import CheckpointError, ConfigError, InputError
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig, PoolingType, column_wise
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD, Adagrad, Adam, DenseRowWiseAdagrad, RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from tests.worlds import output_of, plan_for

ROWS = [12, 7, 30]
# the sparse optimizer, and torch's on a dense gradient: rows without ids have a gradient of zero
# and stay
OPTIMIZERS = {
    "sgd": (SGD, {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "torch sgd": (torch.optim.SGD, {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        Adagrad,
        {"lr": 0.1, "eps": 1e-6},
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6),
    ),
    "rowwise": (
        RowWiseAdagrad,
        {"lr": 0.1, "eps": 1e-6},
        lambda p: DenseRowWiseAdagrad(p, lr=0.1, eps=1e-6),
    ),
    "dense rowwise": (
        DenseRowWiseAdagrad,
        {"lr": 0.1, "eps": 1e-6},
        lambda p: DenseRowWiseAdagrad(p, lr=0.1, eps=1e-6),
    ),
}


def bags() -> list[EmbeddingBagConfig]:
    features = [["a", "b"], ["b"], ["c"]]
    pooling = [PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM]
    return [
        EmbeddingBagConfig(
            ROWS[i], 4 * (i + 1), name=f"t{i}", feature_names=features[i], pooling=pooling[i]
        )
        for i in range(3)
    ]


def sequences() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(ROWS[i], 8, name=f"t{i}", feature_names=[["a", "b"], ["b"], ["c"]][i])
        for i in range(3)
    ]


def batch(seed: int, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (15,), generator=generator)
    limits = torch.tensor([12, 7, 30]).repeat_interleave(lengths.view(3, 5).sum(1))
    ids = (torch.rand(len(limits), generator=generator) * limits).long()
    return KeyedJaggedTensor(
        ["a", "b", "c"],
        ids,
        torch.rand(len(ids), generator=generator) if weighted else None,
        lengths=lengths,
    )


def plain_of(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return (
        EmbeddingCollection(sequences())
        if kind == "sequence"
        else EmbeddingBagCollection(bags(), is_weighted=kind == "weighted")
    )


def fused_of(kind: str, optimizer: type, kwargs: dict, **more) -> nn.Module:
    torch.manual_seed(2)
    if kind == "sequence":
        return FusedEmbeddingCollection(sequences(), optimizer, kwargs, **more)
    return FusedEmbeddingBagCollection(
        bags(), optimizer, kwargs, is_weighted=kind == "weighted", **more
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
def test_training_equals_the_plain_collection_with_a_dense_optimizer(
    kind: str, optimizer: str
) -> None:
    cls, kwargs, dense_of = OPTIMIZERS[optimizer]
    plain, fused = plain_of(kind), fused_of(kind, cls, kwargs)
    dense = dense_of(plain.parameters())
    for step in range(4):
        kjt = batch(step, kind == "weighted")
        want, got = output_of(plain, kjt), output_of(fused, kjt)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        target = torch.rand(want.shape, generator=torch.Generator().manual_seed(step))
        dense.zero_grad()
        (want * target).sum().backward()
        dense.step()
        (got * target).sum().backward()
    for name, weight in plain.state_dict().items():
        # float32 sums in another order
        torch.testing.assert_close(fused.state_dict()[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
def test_names_are_those_of_the_plain_collection_and_rows_are_no_parameters(kind: str) -> None:
    plain, fused = plain_of(kind), fused_of(kind, SGD, {"lr": 0.1})
    assert list(fused.state_dict()) == list(plain.state_dict()) and not list(fused.parameters())
    assert all(
        torch.equal(value, fused.state_dict()[name]) for name, value in plain.state_dict().items()
    )
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    fused.load_state_dict(other)
    assert torch.equal(fused.rows_of("t1"), other[next(name for name in other if ".t1." in name)])
    assert (
        fused.optimizer_type() is SGD
        and fused.optimizer_kwargs() == {"lr": 0.1}
        and fused.device.type == "cpu"
    )


def test_evaluation_leaves_rows_alone() -> None:
    fused = fused_of("pooled", SGD, {"lr": 0.1})
    before = copy.deepcopy(fused.state_dict())
    with torch.no_grad():
        fused(batch(0))
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())


def test_the_fused_optimizer_has_learning_rate_and_state_by_name() -> None:
    fused = fused_of("pooled", Adam, {"lr": 0.1})
    fused(batch(0)).values().sum().backward()
    optimizer = fused.fused_optimizer
    assert {"embedding_bags.t0.weight", "embedding_bags.t2.weight"} <= set(
        optimizer.state_dict()["state"]
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(fused.state_dict())
    fused(batch(1)).values().sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())
    fused.set_learning_rate(0.1)
    fused(batch(1)).values().sum().backward()
    assert not torch.equal(
        fused.state_dict()["embedding_bags.t0.weight"], before["embedding_bags.t0.weight"]
    )
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict({"state": {}})


@pytest.mark.parametrize("form", ["sharded", "fused"])
def test_optimizer_state_in_the_names_of_torchrec_is_taken(form: str) -> None:
    saved = fused_of("pooled", Adam, {"lr": 0.1})
    saved(batch(0)).values().sum().backward()
    own = saved.fused_optimizer().state_dict()["state"]
    assert set(own["embedding_bags.t0.weight"]) == {"t0.momentum1", "t0.exp_avg_sq"}
    theirs = {}
    for name, state in own.items():
        table = name.split(".")[1]
        first, second = state[f"{table}.momentum1"].clone(), state[f"{table}.exp_avg_sq"].clone()
        if form == "fused":
            name, keys = f"{table}.weight", ("weight.momentum_1", "weight.momentum_2")
        else:
            keys = ("momentum1", "exp_avg_sq")
        theirs[name] = {f"{table}.{keys[0]}": first, f"{table}.{keys[1]}": second}
    new = fused_of("pooled", Adam, {"lr": 0.1}).fused_optimizer()
    new.load_state_dict({"state": theirs})
    for name, state in new.state_dict()["state"].items():
        assert all(torch.equal(value, own[name][key]) for key, value in state.items())


def test_an_optimizer_without_state_takes_none() -> None:
    optimizer = fused_of("pooled", SGD, {"lr": 0.1}).fused_optimizer
    saved = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_whole_optimizer_state_is_taken_by_shards() -> None:
    """A table of two column blocks on one rank takes its parts of the whole table's state."""
    table = EmbeddingBagConfig(6, 8, name="t", feature_names=["a"])
    layout = column_wise(table, [0, 0])
    plan = plan_for(1, {"t": layout})
    model = DistributedModelParallel(
        nn.ModuleDict({"ebc": EmbeddingBagCollection([table])}),
        plan=plan,
        sparse_optimizer=Adagrad(0.1),
    )
    optimizer, whole = model.fused_optimizer(), torch.rand(6, 8)
    optimizer.load_state_dict({"state": {"ebc.embedding_bags.t.weight": {"t.momentum1": whole}}})
    for state in model.shard_states():
        cols = state.shard.cols
        assert torch.equal(state.optimizer["momentum1"], whole[:, cols.start : cols.stop])
    with pytest.raises(CheckpointError, match=r"shape \(7, 8\)"):
        optimizer.load_state_dict(
            {"state": {"ebc.embedding_bags.t.weight": {"t.momentum1": torch.rand(7, 8)}}}
        )


class Model(nn.Module):
    """A pooled collection in two places, a sequence, and a layer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.pooled = EmbeddingBagCollection(bags(), device=device)
        self.again = nn.ModuleList([self.pooled])
        others = [EmbeddingConfig(9, 8, name="s", feature_names=["a"])]
        self.deep = nn.ModuleDict({"sequence": EmbeddingCollection(others, device=device)})
        self.layer = nn.Linear(1, 1)


def test_fusing_a_model_takes_its_rows_over() -> None:
    model = Model()
    saved = copy.deepcopy(model.state_dict())
    assert fuse_embedding_optimizer(model, RowWiseAdagrad, {"lr": 0.1}) is model
    assert isinstance(model.pooled, FusedEmbeddingBagCollection) and model.again[0] is model.pooled
    assert isinstance(model.deep["sequence"], FusedEmbeddingCollection) and isinstance(
        model.layer, nn.Linear
    )
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    alone = fuse_embedding_optimizer(plain_of("sequence"), torch.optim.Adagrad, {"lr": 0.1})
    assert isinstance(alone, FusedEmbeddingCollection) and alone.sparse_optimizer == Adagrad(
        0.1, eps=1e-10
    )


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_an_error_of_options(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"device='{device}' cannot be used here \(.*GPUs"):
        DistributedModelParallel(EmbeddingBagCollection(bags(), device="meta"), device=device)
    with pytest.raises(ConfigError, match=rf"device='{device}'"):
        FusedEmbeddingCollection(sequences(), SGD, {"lr": 0.1}, device=device)


def test_a_fused_model_is_sharded_with_its_optimizer_and_rows() -> None:
    model = fuse_embedding_optimizer(Model(), Adagrad, {"lr": 0.3})
    rows = model.pooled.rows_of("t2").clone()
    plan = plan_for(1, {t.name: column_wise(t, [0, 0]) for t in table_configs(model)})
    sharded = DistributedModelParallel(model, plan=plan, sparse_optimizer=SGD(0.1))
    assert set(sharded.sparse_optimizers.values()) == {Adagrad(0.3)}
    assert torch.equal(sharded.state_dict()["pooled.embedding_bags.t2.weight"], rows)
    on_meta = FusedEmbeddingBagCollection(bags(), SGD, {"lr": 0.1}, device="meta")
    with pytest.raises(ConfigError, match="lies on the meta device"):
        on_meta(batch(0))
    plan = plan_for(1, {t.name: column_wise(t, [0]) for t in bags()})
    torch.manual_seed(2)
    born = DistributedModelParallel(nn.Sequential(on_meta), plan=plan)
    want = plain_of("pooled")(batch(0)).values()
    torch.testing.assert_close(born(batch(0)).values(), want)


def test_a_deep_copy_trains_alike_and_apart() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fused = FusedEmbeddingBagCollection(
            [EmbeddingBagConfig(5000, 64, name="t", feature_names=["a"])], Adam, {"lr": 0.1}
        )
        ids = KeyedJaggedTensor(
            ["a"], torch.randint(0, 5000, (4000,)), lengths=torch.full((400,), 10)
        )
        fused(ids).values().sum().backward()  # large enough to have started threads
        twin = copy.deepcopy(fused)
        before = twin.rows_of("t").clone()
        fused(ids).values().square().sum().backward()
        assert torch.equal(twin.rows_of("t"), before)
        twin(ids).values().square().sum().backward()
        assert torch.equal(twin.rows_of("t"), fused.rows_of("t")) and not torch.equal(
            twin.rows_of("t"), before
        )
    finally:
        torch.set_num_threads(threads)


def test_mistakes_raise_typed_errors() -> None:
    with pytest.raises(ConfigError, match="no counterpart"):
        FusedEmbeddingBagCollection(bags(), torch.optim.NAdam, {})
    with pytest.raises(ConfigError, match="rate"):
        FusedEmbeddingCollection(sequences(), SGD, {"rate": 0.1})
    fused = fused_of("pooled", SGD, {"lr": 0.1})
    with pytest.raises(ConfigError, match="make it there: device='meta'"):
        nn.Sequential(fused).to("meta")
    nn.Sequential(fused).to("cpu")
    bad = KeyedJaggedTensor(
        ["a", "b", "c"], torch.tensor([0, 7, 0]), lengths=torch.ones(3, dtype=torch.int64)
    )
    with pytest.raises(InputError, match="id 7 of key 'b'"):
        fused(bad)


def test_the_fused_collections_are_public() -> None:
    assert rayrec.FusedEmbeddingBagCollection is FusedEmbeddingBagCollection
    assert rayrec.fuse_embedding_optimizer is fuse_embedding_optimizer
