"""Next-item models in random worlds: any ranks and plan equal plain torch, token by token."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rayrec.data import ItemSlices, SharedNegatives
from rayrec.layout import EmbeddingConfig, ShardingPlan, Topology
from rayrec.models import FullSoftmax, NextItem, NextItemTrain, SampledSoftmax
from rayrec.modules import EmbeddingCollection, GRUEncoder, HSTUEncoder, SASRecEncoder
from rayrec.planner import manual_plan
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from tests.sim.whole_models import check_equals_plain, train
from tests.unit.sequence_reference import plain_states

WIDTH, LONGEST, STEPS, LR = 8, 7, 2, 0.5
ENCODERS: dict[str, Callable[[int], nn.Module]] = {
    "sasrec": lambda layers: SASRecEncoder(WIDTH, LONGEST, layers, 2, 0.0),
    "hstu": lambda layers: HSTUEncoder(WIDTH, LONGEST, layers, 2, 0.0),
    "gru4rec": lambda layers: GRUEncoder(WIDTH, layers, 0.0),
}
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


class Row(NamedTuple):
    history: list[int]
    item: int
    times: list[int]


class World:
    """Rows of some ranks by step, and a model of random sizes."""

    def __init__(self, encoder: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.ranks, self.kind = rng.randint(1, 4), rng.choice(KINDS)
        self.items = rng.randint(self.ranks, 30)
        self.encoder = ENCODERS[encoder](rng.randint(1, 2))
        for parameter in self.encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.table, self.bias = torch.randn(self.items, WIDTH), torch.randn(self.items)
        counts = torch.tensor([rng.randint(0, 5) for _ in range(self.items)]).numpy()
        counts[0] += 1
        drawn = SharedNegatives(count=rng.randint(1, 9), num_items=self.items, counts=counts)
        self.is_full = bool(rng.randint(0, 1))
        self.in_batch = not self.is_full and bool(rng.randint(0, 1))
        self.log_q = torch.from_numpy(drawn.log_q())
        self.candidates = ItemSlices(num_items=self.items) if self.is_full else drawn
        self.steps = [
            [[self.row() for _ in range(rng.choice([0, 1, 2, 4]))] for _ in range(self.ranks)]
            for _ in range(STEPS)
        ]

    def row(self) -> Row:
        length = self.rng.choice([0, 1, self.rng.randint(0, LONGEST)])
        ids = [self.rng.randrange(self.items) for _ in range(length + 1)]
        times = sorted(self.rng.randrange(10**6) for _ in range(length))
        return Row(ids[:-1], ids[-1], times)

    def plan(self) -> ShardingPlan:
        return manual_plan([self.config()], self.kind, Topology.local(self.ranks))

    def config(self) -> EmbeddingConfig:
        names = ["history", "item", "candidates"][: 2 if self.in_batch else 3]
        return EmbeddingConfig(self.items, WIDTH, name="song", feature_names=names)

    def model(self) -> NextItemTrain:
        collection = EmbeddingCollection([self.config()])
        collection.embeddings["song"].weight.data.copy_(self.table)
        times = "times" if isinstance(self.encoder, HSTUEncoder) else None
        model = NextItem(
            collection,
            copy.deepcopy(self.encoder),
            candidates=None if self.in_batch else "candidates",
            bias=self.bias.clone(),
            times=times,
        )
        loss = FullSoftmax(self.items) if self.is_full else SampledSoftmax(self.items, self.log_q)
        return NextItemTrain(model, loss)

    def tokens(self, step: int) -> int:
        return max(1, sum(len(row.history) for rows in self.steps[step] for row in rows))

    def targets(self, step: int) -> list[int]:
        """The items that the tokens of all ranks are to find."""
        rows = [row for rows in self.steps[step] for row in rows if row.history]
        return [item for row in rows for item in [*row.history[1:], row.item]]


class Part:
    """A rank's part of a global batch."""

    def __init__(self, world: World, step: int, rank: int) -> None:
        rows = world.steps[step][rank]
        chosen: list[int] = []
        if not world.in_batch:
            chosen = world.candidates.ids(0, step, rank, world.ranks).tolist()
        flat = [i for row in rows for i in row.history] + [row.item for row in rows] + chosen
        lengths = [len(row.history) for row in rows]
        bags, keys = [*lengths, *[1] * len(rows), len(chosen)], len(world.config().feature_names)
        strides = [[len(rows)], [len(rows)], [1]][:keys]
        self.sparse_features = KeyedJaggedTensor(
            world.config().feature_names,
            torch.tensor(flat, dtype=torch.int64),
            lengths=torch.tensor(bags[: sum(one for (one,) in strides)], dtype=torch.int32),
            stride_per_key_per_rank=strides,
        )
        times = torch.tensor([t for row in rows for t in row.times], dtype=torch.int64)
        own = torch.tensor(lengths, dtype=torch.int32)
        self.sequences = {"times": JaggedTensor(times, lengths=own)}


def plain_loss(world: World, model: NextItem, step: int) -> Tensor:
    """The mean over the tokens of the global batch."""
    weight, bias = model.items.embeddings["song"].weight, model.bias
    drawn = None if world.is_full else world.candidates.ids(0, step, 0, 1).tolist()
    if world.in_batch:
        drawn = world.targets(step)
    losses = [weight.sum() * 0]
    for row in (row for rows in world.steps[step] for row in rows):
        if not row.history:
            continue
        past = torch.tensor(row.history)
        states = plain_states(model.encoder, weight[past], torch.tensor(row.times))
        for state, wanted in zip(states, [*row.history, row.item][1:], strict=True):
            scores = weight @ state + bias
            others = list(scores)
            if drawn is not None:
                few = torch.log(torch.tensor(float(len(drawn))))
                negatives = [scores[n] - world.log_q[n] - few for n in drawn if n != wanted]
                others = [scores[wanted], *negatives]
            losses.append(torch.stack(others).logsumexp(0) - scores[wanted])
    return torch.stack(losses).sum() / world.tokens(step)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.seeds(range(100))
def test_ranks_equal_plain_torch(encoder: str, seed: int) -> None:
    world = World(encoder, seed)

    def share_of(model: nn.Module, step: int, rank: int) -> tuple[Tensor, None]:
        assert isinstance(model, NextItemTrain)
        batch = Part(world, step, rank)
        value, _ = model(batch)
        return value * model.loss_count(batch) / world.tokens(step), None

    reference = world.model()
    found = train(reference, world.plan(), share_of, STEPS, LR, in_place=bool(seed % 2))
    check_equals_plain(found, reference, lambda step: plain_loss(world, reference.model, step), LR)
