"""Every kind of model under DistributedModelParallel, unchanged: N ranks equal plain torch.

The reference is the unsharded module under torch's SGD, its loss the sum over the ranks' parts of
the global batch, each weighted by its share of the rows. For the click models that is the loss of
the whole batch, whatever the ranks; in-batch negatives depend on the parts.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import Topology
from rayrec.models import (
    DIN,
    PLE,
    DeepFMTrain,
    DLRMTrain,
    HSTURanking,
    MMoE,
    MultiTaskTrain,
    SimpleDeepFMNN,
    TwoTower,
    TwoTowerTrain,
)
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    HSTUEncoder,
    PoolingType,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from rayrec.optim import SGD
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor
from rayrec.spec.task import Task
from rayrec.train.step import train_step
from tests.ranks import RankPool
from tests.worlds import part_of

KEYS, SIZES, PLACES, LR = ["a", "b", "c"], [30, 7, 12], 4, 0.3


class Part(NamedTuple):
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    rows: int
    global_rows: int


def part(step: int, rank: int, world_size: int, kind: str) -> Part:
    """Rows of a rank; bags of up to PLACES ids, or of exactly one for two towers."""
    single = kind in TOWERS
    # of three rows, four ranks cannot all have one
    rng, rows = random.Random(step), 3 if step == 2 else 14
    start, stop = rank * rows // world_size, (rank + 1) * rows // world_size
    bags = [
        [
            [rng.randrange(n) for _ in range(1 if single else rng.randrange(PLACES + 1))]
            for _ in range(rows)
        ]
        for n in SIZES
    ]
    mine = [bag for key in bags for bag in key[start:stop]]
    ids, lengths = [i for bag in mine for i in bag], [len(bag) for bag in mine]
    kjt = KeyedJaggedTensor(
        KEYS,
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=stop - start,
    )
    generator = torch.Generator().manual_seed(step)
    dense, labels = (
        torch.randn(rows, 5, generator=generator),
        torch.randint(0, 2, (rows,), generator=generator).float(),
    )
    if kind in ("mmoe", "ple"):
        classes = torch.randint(0, 3, (rows,), generator=generator)
        labels = torch.stack((labels, classes.float()), dim=1)
    return Part(dense[start:stop], kjt, labels[start:stop], stop - start, rows)


class Places(nn.Module):
    """A linear click model over bags whose ids weigh what their place does."""

    def __init__(self, tables: EmbeddingBagCollection, one_module: bool) -> None:
        super().__init__()
        processors: Any = {key: PositionWeightedModule(PLACES) for key in KEYS[:2]}
        if one_module:
            processors = PositionWeightedModuleCollection(dict.fromkeys(KEYS[:2], PLACES))
        self.bags = FeatureProcessedEmbeddingBagCollection(tables, processors)
        self.head = nn.Linear(3 * 8, 1)

    def forward(self, batch: Part) -> Any:
        logits = self.head(self.bags(batch.sparse_features).values()).squeeze(1)
        reduction = "mean" if batch.rows else "sum"
        loss = functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction=reduction
        )
        return loss, (loss.detach(), logits.detach(), batch.labels)


def tables(names: str, device: str, weighted: bool = False) -> EmbeddingBagCollection:
    pooling = {"a": PoolingType.SUM, "b": PoolingType.MEAN, "c": PoolingType.SUM}
    chosen = [(k, n) for k, n in zip(KEYS, SIZES, strict=True) if k in names]
    configs = [
        EmbeddingBagConfig(n, 8, name=f"t_{k}", feature_names=[k], pooling=pooling[k])
        for k, n in chosen
    ]
    return EmbeddingBagCollection(configs, is_weighted=weighted, device=device)


def build(kind: str, device: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "deepfm":
        return DeepFMTrain(
            SimpleDeepFMNN(
                5, tables("abc", device), hidden_layer_size=8, deep_fm_dimension=4, per_column=True
            )
        )
    if kind == "din":
        # candidates of none or several ids, and histories that share their table
        shared = EmbeddingConfig(SIZES[0], 8, name="t_s", feature_names=["a", "c"])
        sequences = EmbeddingCollection([shared], device=device)
        return DLRMTrain(DIN(sequences, {"c": "a"}, [6, 1], tables("b", device), 5, [4], [5]))
    if kind == "hstu":
        # actions are a history alone; rows have no or several candidates, and may have no event
        items = EmbeddingConfig(SIZES[0], 8, name="t_s", feature_names=["a", "c"])
        actions = EmbeddingConfig(SIZES[2], 8, name="t_w", feature_names=["c"])
        sequences = [EmbeddingCollection([items, actions], device=device)]
        encoder = HSTUEncoder(8, PLACES + 3, dropout=0.0, time_buckets=0)
        histories = {"c@t_s": "a", "c@t_w": None}
        return DLRMTrain(
            HSTURanking(sequences, histories, encoder, [6, 1], tables("b", device), 5, [4])
        )
    if kind in ("mmoe", "ple"):
        tasks = [Task(name="click"), Task(name="genre", kind="multiclass", classes=3, weight=0.5)]
        common = tables("abc", device), [task.outputs for task in tasks], 5, [4]
        if kind == "mmoe":
            model: nn.Module = MMoE(*common, 3, [8], [6])
        else:
            model = PLE(*common, 2, 1, 2, [8], [6])
        # torch's own values are small, and gradients shrink on the way through several layers
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not is_table(name):
                    parameter *= 2.5
        return MultiTaskTrain(model, tasks)
    if kind in TOWERS:
        log_q = torch.linspace(-3, -1, SIZES[1])
        return TwoTowerTrain(
            TwoTower(tables("ac", device), [8, 4], tables("b", device)),
            0.2,
            "b",
            log_q,
            all_ranks=kind == "two towers of all ranks",
        )
    return Places(tables("abc", device, weighted=True), one_module=kind == "places of a batch")


TOWERS = ["two towers", "two towers of all ranks"]
KINDS = [
    "deepfm",
    "din",
    "hstu",
    "mmoe",
    "ple",
    *TOWERS,
    "places of a batch",
    "places of a feature",
]
STEPS = 4


def is_table(name: str) -> bool:
    return ".embedding_bags." in name or ".embeddings." in name


def sharded(
    rank: int, world_size: int, kind: str, sharding: str
) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    module = build(kind, "meta")
    plan = manual_plan(
        table_configs(module), sharding, Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(module, plan=plan, sparse_optimizer=SGD(lr=LR), seed=5)
    dense = torch.optim.SGD(model.parameters(), lr=LR)
    parts = [part(step, rank, world_size, kind) for step in range(STEPS)]
    losses = [float(train_step(model, dense, p, world_size).loss_sum) for p in parts]
    rectangles = [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, rectangles


def plain(world_size: int, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(kind, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        parts = [part(step, rank, world_size, kind) for rank in range(world_size)]
        loss_sum = torch.stack([model(p)[0] * p.rows for p in parts]).sum()
        optimizer.zero_grad()
        (loss_sum / parts[0].global_rows).backward()
        optimizer.step()
        losses.append(loss_sum.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "world_size, sharding",
    [(1, "table_wise"), (2, "row_wise"), (2, "column_wise"), (4, "row_wise")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_n_ranks_equals_plain_torch(
    ranks: RankPool, kind: str, world_size: int, sharding: str
) -> None:
    close = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums over ranks and bags in another order
    # negatives of all ranks: as many ranks as there are train as one
    one = kind == "two towers of all ranks"
    wanted_losses, wanted = plain(1 if one else world_size, kind)
    results = ranks.run(world_size, sharded, kind, sharding)
    torch.testing.assert_close(
        torch.tensor([r[0] for r in results]).sum(0), torch.tensor(wanted_losses), **close
    )
    full = {name.split(".")[-2]: value for name, value in wanted.items() if is_table(name)}
    before = dict(build(kind, "cpu").named_parameters())
    # every parameter moved
    assert all((wanted[name] - p).abs().max() > 1e-4 for name, p in before.items())
    for _, dense, rectangles in results:
        assert set(dense) == {name for name in wanted if not is_table(name)}
        for name, value in dense.items():
            torch.testing.assert_close(value, wanted[name], **close)
        for shard, weight in rectangles:
            torch.testing.assert_close(weight, part_of(full[shard.table], shard), **close)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TOWERS])
def test_click_models_do_not_depend_on_the_number_of_ranks(kind: str) -> None:
    one, two = plain(1, kind), plain(2, kind)
    torch.testing.assert_close(one[0], two[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one[1], two[1], rtol=1e-4, atol=1e-5)


def test_in_batch_negatives_do_depend_on_it() -> None:
    assert plain(1, "two towers")[0][0] > 1.1 * plain(2, "two towers")[0][0]
