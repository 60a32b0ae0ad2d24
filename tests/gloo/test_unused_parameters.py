"""Dense parameters that a step does not use, on all ranks or on some: N ranks train as one on the
global batch.

Every quarter of a batch goes through one head of the model, so that the heads that a rank uses
follow from its rows. AdamW tells a gradient of zero from none: with none it keeps its moments and
decays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from rayrec.comm.unused import CLONED_ELEMENTS, reach_all
from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, row_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.step import train_step
from tests.ranks import RankPool
from tests.worlds import plan_for

HEADS, GLOBAL, DIM, IDS = 5, 16, 4, 20
# by step: the head of each quarter of the batch; head 4 is never used, head 3 by one rank alone
ROUTES = [
    (0, 0, 0, 0),
    (1, 1, 1, 1),
    (0, 1, 2, 2),
    (0, 0, 0, 3),
    (2, 2, 2, 2),
    (0, 1, 2, 3),
    (0, 0, 0, 0),
]
CLOSE = {
    "rtol": 2e-4,
    "atol": 1e-5,
}  # float32 sums in another order, divided by roots of second moments


class Batch:
    """A rank's part of the batch of one step."""

    def __init__(self, step: int, rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(step)
        ids, labels = (
            torch.randint(0, IDS, (GLOBAL,), generator=generator),
            torch.rand(GLOBAL, generator=generator),
        )
        mine = slice(rank * GLOBAL // world_size, (rank + 1) * GLOBAL // world_size)
        self.ids, self.labels = ids[mine], labels[mine]
        self.rows, self.global_rows = len(self.ids), GLOBAL
        self.heads = torch.tensor(ROUTES[step]).repeat_interleave(GLOBAL // 4)[mine].tolist()


class Heads(nn.Module):
    """A table and heads, each of which sees the rows that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        table = EmbeddingBagConfig(IDS, DIM, name="t", feature_names=["f"])
        self.tables = EmbeddingBagCollection([table], device="meta")
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(HEADS)
        )

    def forward(self, batch: Batch):
        ids = KeyedJaggedTensor(["f"], batch.ids, lengths=torch.ones(batch.rows, dtype=torch.int64))
        rows = self.tables(ids).values()
        logits = torch.cat(
            [self.heads[head](rows[i : i + 1]) for i, head in enumerate(batch.heads)]
        ).squeeze(1)
        loss = nn.functional.mse_loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def sharded(world_size: int, **options) -> DistributedModelParallel:
    table = EmbeddingBagConfig(IDS, DIM, name="t", feature_names=["f"])
    plan = plan_for(world_size, {"t": row_wise(table, range(world_size))})
    return DistributedModelParallel(
        Heads(), plan=plan, sparse_optimizer=SGD(0.1), seed=1, **options
    )


def train(rank: int, world_size: int, options: dict):
    """By step the parameters without a gradient, and the final parameters."""
    model = sharded(world_size, **options)
    dense = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    without = []
    for step in range(len(ROUTES)):
        train_step(model, dense, Batch(step, rank, world_size), world_size)
        without.append({name for name, p in model.named_parameters() if p.grad is None})
    return without, {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIONS = {
    "as it is": {},
    "process group": {"transport": "process_group"},
    "small buckets": {"ddp_options": {"bucket_cap_mb": 1e-5}},
    "a hook that casts": {"ddp_options": {"comm_hook": (None, fp16_compress_hook)}},
    "copied gradients": {"ddp_options": {"gradient_as_bucket_view": False}},
    "found by DDP": {"ddp_options": {"find_unused_parameters": True}},
}


SLOW = ("small buckets", "copied gradients")


@pytest.mark.parametrize(
    "options",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in OPTIONS],
)
def test_1_2_and_4_ranks_train_alike(ranks: RankPool, options: str) -> None:
    ((without, wanted),) = ranks.run(1, train, {})
    assert [sum(name.endswith("0.weight") for name in names) for names in without] == [
        4,
        4,
        2,
        3,
        4,
        1,
        4,
    ]
    # float16 on the wire
    close = {"rtol": 1e-2, "atol": 1e-3} if options == "a hook that casts" else CLOSE
    for world_size in (2, 4):
        for found_without, found in ranks.run(world_size, train, OPTIONS[options]):
            assert found_without == without
            for name, value in found.items():
                torch.testing.assert_close(value, wanted[name], **close)


# by step: the heads that are trained from then on
THAWED = {0: (), 1: (0, 1, 2), 3: (0, 2, 3), 5: (0, 1, 2, 3, 4)}


def train_some(rank: int, world_size: int):
    model = sharded(world_size)
    dense = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(len(ROUTES)):
        if step in THAWED:
            for number, head in enumerate(model.module.heads):
                head.requires_grad_(number in THAWED[step])
        dense.zero_grad()
        with model.no_sync():
            model(Batch(6, rank, world_size))[0].backward()
        model(Batch(step, rank, world_size))[0].backward()
        dense.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_heads_that_are_frozen_and_thawed_train_as_on_one_rank(ranks: RankPool) -> None:
    (wanted,) = ranks.run(1, train_some)
    for found in ranks.run(2, train_some):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], **CLOSE)


def kept(rank: int, world_size: int) -> dict:
    """Gradients of one rank, where parameters are thawed while none is averaged."""
    model = sharded(world_size)
    model.module.heads.requires_grad_(False)
    with model.no_sync():
        model.module.heads.requires_grad_(True)
        model(Batch(0, rank, world_size))[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_what_is_thawed_inside_no_sync_is_not_averaged(ranks: RankPool) -> None:
    first, second = ranks.run(2, kept)
    assert len(first) == len(second) == 4  # all rows go through head 0
    assert not any(torch.equal(grad, second[name]) for name, grad in first.items())


def refused_twice(rank: int, world_size: int) -> list[str]:
    model = Heads()
    model.heads.requires_grad_(False)
    table = EmbeddingBagConfig(IDS, DIM, name="t", feature_names=["f"])
    model = DistributedModelParallel(
        model,
        plan=plan_for(world_size, {"t": row_wise(table, range(world_size))}),
        sparse_optimizer=SGD(0.1),
        ddp_options={"bucket_cap_mb": []},
    )
    model.module.heads.requires_grad_(True)
    said = []
    for _ in range(2):
        try:
            model(Batch(0, rank, world_size))
        except ConfigError as error:
            said.append(str(error))
    return said


def test_without_ddp_no_step_goes_on(ranks: RankPool) -> None:
    for said in ranks.run(2, refused_twice):
        assert len(said) == 2 and said[0] == said[1] and "bucket_cap_mb" in said[0]


def accumulated(rank: int, world_size: int):
    """Two batches, one update: a head that only the first of them used has a gradient."""
    model = sharded(world_size)
    with model.no_sync():
        model(Batch(3, rank, world_size))[0].backward()
    model(Batch(0, rank, world_size))[0].backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def test_a_gradient_of_an_earlier_batch_is_averaged(ranks: RankPool) -> None:
    (wanted,) = ranks.run(1, accumulated)
    assert wanted["heads.3.0.bias"] is not None and wanted["heads.1.0.bias"] is None
    for found in ranks.run(4, accumulated):
        for name, grad in found.items():
            assert (grad is None) == (wanted[name] is None), name
            if grad is not None:
                torch.testing.assert_close(grad, wanted[name], **CLOSE)


def negative_zeros(rank: int, world_size: int):
    """Rank 0 has a gradient of negative zeros for head 1, and rank 1 for head 0."""
    model = sharded(world_size)
    for p in model.parameters():
        p.register_hook(lambda grad: torch.full_like(grad, -0.0))
    model(Batch(1 if rank == 0 else 0, rank, world_size))[0].backward()
    return {name: p.grad is None for name, p in model.named_parameters()}


def test_a_gradient_of_negative_zeros_is_one(ranks: RankPool) -> None:
    found = ranks.run(2, negative_zeros)
    assert found[0] == found[1]
    assert (
        not found[0]["heads.0.0.weight"]
        and not found[0]["heads.1.0.weight"]
        and found[0]["heads.2.0.weight"]
    )


def static(rank: int, world_size: int):
    model = sharded(world_size, ddp_options={"static_graph": True})
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, dense, Batch(0, rank, world_size), world_size)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_static_graph_is_ddps_own_affair(ranks: RankPool) -> None:
    (wanted,) = ranks.run(1, static)
    for found in ranks.run(2, static):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], **CLOSE)


def ignoring(rank: int, world_size: int):
    model = sharded(world_size, ddp_options={"params_to_ignore": ["heads.0.2.bias"]})
    model(Batch(5, rank, world_size))[0].backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def test_ignored_parameters_are_not_averaged(ranks: RankPool) -> None:
    first, second = ranks.run(2, ignoring)
    # rank 0 alone sees head 0
    assert first["heads.0.2.bias"] is not None and second["heads.0.2.bias"] is None
    assert torch.equal(first["heads.1.2.bias"], second["heads.1.2.bias"])


@pytest.mark.parametrize(
    "options, match",
    [
        ({"bucket_cap": 1}, "'bucket_cap', which is none of .*bucket_cap_mb"),
        ({"process_group": None}, "'process_group'"),
        ({"params_to_ignore": ["heads.9.weight"]}, r"'heads\.9\.weight'"),
        ({"comm_hook": fp16_compress_hook}, r"a pair \(state, hook\)"),
    ],
)
def test_wrong_options_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sharded(1, ddp_options=options)


# the output from which all parameters are reached


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    others: dict
    name: str = "x"


def reached(make) -> set[int]:
    """Which of three parameters a backward pass from `make(output)` reaches, the first alone being
    used.
    """
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    found: set[int] = set()
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters]
    for i, node in enumerate(nodes):
        node.register_hook(lambda *_, i=i: found.add(i))
    value = parameters[0].sum()
    make(value, lambda output: reach_all(output, parameters)).backward()
    assert (
        torch.equal(parameters[0].grad, torch.ones(2))
        and parameters[1].grad is None
        and parameters[2].grad is None
    )
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda value, reach: reach(value),
        lambda value, reach: reach((value, [value.detach(), None]))[0],
        lambda value, reach: reach({"a": {"b": value}})["a"]["b"],
        lambda value, reach: reach(Output(value.detach(), {"logits": (value, 3)})).others["logits"][
            0
        ],
        lambda value, reach: reach(value.expand(CLONED_ELEMENTS + 1))[0],
    ],
)
def test_every_parameter_is_reached_from_any_output(make) -> None:
    assert reached(make) == {0, 1, 2}


def test_outputs_may_be_changed_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    loss = reach_all(weight.sum(), [weight])
    loss /= 4
    loss.backward()
    assert torch.equal(weight.grad, torch.full((2,), 0.25))
