"""DIN, HSTU for ranking, MMoE and PLE in random worlds: any ranks and plan equal plain torch."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.distributed import table_configs
from rayrec.models import PLE, MMoE, MultiTaskTrain
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.spec.task import Task
from tests.sim.whole_models import CLOSE, check_equals_plain, train
from tests.unit import din_twin, hstu_twin, task_twins
from tests.unit.hstu_twin import cut
from tests.worlds import plan_for, random_layout

LONGEST, STEPS, LR = 7, 2, 0.3
MODELS = ("din", "hstu_ranking", "mmoe", "ple")
HOSTS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1))  # ranks of each, and their number
# between seeds of batches: the remainder of a seed says how many columns and candidates there are
APART = 60


class Part(NamedTuple):
    """Some rows of a global batch, or all of them."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    sequences: dict[str, JaggedTensor]
    labels: Tensor

    def rows(self, low: int, high: int) -> Part:
        sequences = {}
        for name, one in self.sequences.items():
            alone = KeyedJaggedTensor([name], one.values(), lengths=one.lengths())
            sequences[name] = cut(alone, low, high)[name]
        ids = cut(self.sparse_features, low, high)
        return Part(self.dense_features[low:high], ids, sequences, self.labels[low:high])


class World:
    """A model of random sizes, a plan of any layouts, and the batches of all steps in parts."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.rng = name, random.Random(seed)
        model, outputs, self.columns = self.drawn(seed)
        for parameter in model.parameters():
            # torch's own values are small, and gradients shrink on the way through several layers
            nn.init.normal_(parameter, std=0.5)
        self.tasks = [self.task(f"task_{n}", size) for n, size in enumerate(outputs)]
        self.model = MultiTaskTrain(model, self.tasks)
        each, count = self.rng.choice(HOSTS)
        hosts = tuple(tuple(range(h * each, (h + 1) * each)) for h in range(count))
        layouts = {t.name: random_layout(t, hosts, self.rng) for t in table_configs(model)}
        self.plan = plan_for(each * count, layouts, hosts)
        self.batches = [self.batch(seed + step * APART) for step in range(STEPS)]
        self.cuts = []
        for batch in self.batches:
            rows = len(batch.labels)
            inner = sorted(self.rng.randint(0, rows) for _ in range(each * count - 1))
            self.cuts.append([*pairwise([0, *inner, rows])])

    def drawn(self, seed: int) -> tuple[nn.Module, list[int], int]:
        """A model, the outputs of its tasks, and its dense columns."""
        if self.name == "din":
            return din_twin.din(seed), [1], 2
        if self.name == "hstu_ranking":
            return hstu_twin.ranking(seed), [1] * (1 + seed % 2), 0
        return task_twins.drawn(MMoE if self.name == "mmoe" else PLE, seed)

    def task(self, name: str, outputs: int) -> Task:
        weight = self.rng.choice([1.0, 0.5])
        if outputs > 1:
            return Task(name=name, kind="multiclass", classes=outputs, weight=weight)
        return Task(name=name, kind=self.rng.choice(["binary", "regression"]), weight=weight)

    def batch(self, seed: int) -> Part:
        """Some rows; histories of 0, 1 or up to `LONGEST` events."""
        lengths = [
            self.rng.choice([0, 1, self.rng.randint(0, LONGEST)])
            for _ in range(self.rng.randint(1, 9))
        ]
        sequences: dict[str, JaggedTensor] = {}
        if self.name == "din":
            ids = din_twin.ids(seed, lengths)
            dense = torch.randn(len(lengths), self.columns)
        elif self.name == "hstu_ranking":
            rows = hstu_twin.Rows(seed, lengths)
            dense, ids, sequences = rows.dense_features, rows.sparse_features, rows.sequences
        else:
            dense, ids = task_twins.batch(seed, self.columns)
        labels = [self.labels(task, len(dense)) for task in self.tasks]
        return Part(dense, ids, sequences, torch.stack(labels, dim=1))

    def labels(self, task: Task, rows: int) -> Tensor:
        if task.kind == "regression":
            return torch.randn(rows)
        return torch.randint(0, task.classes or 2, (rows,)).float()

    def logits(self, batch: Part) -> Tensor:
        """What the model gives by plain torch, in float64."""
        model, ids = self.model.model, batch.sparse_features
        if self.name == "din":
            return din_twin.twin(model, batch.dense_features, ids)
        if self.name == "hstu_ranking":
            return hstu_twin.twin(model, batch)
        twin = task_twins.Twin(model)
        formula = twin.mmoe if self.name == "mmoe" else twin.ple
        return formula(twin.input(batch.dense_features, ids), len(self.tasks))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over rows of the losses of all tasks, by their formulas."""
        total = logits.new_zeros(())
        sizes = [task.outputs for task in self.tasks]
        columns = zip(self.tasks, logits.split(sizes, dim=1), labels.unbind(1), strict=True)
        for task, own, label in columns:
            if task.kind == "binary":
                losses = functional.softplus(own[:, 0]) - label * own[:, 0]
            elif task.kind == "regression":
                losses = (own[:, 0] - label).square() / 2
            else:
                right = own.gather(1, label.long().unsqueeze(1)).squeeze(1)
                losses = own.exp().sum(1).log() - right
            total = total + task.weight * losses.sum()
        return total / max(1, len(labels))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.seeds(range(100))
def test_ranks_equal_plain_torch(name: str, seed: int) -> None:
    world = World(name, seed)

    def share_of(model: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor]:
        whole = world.batches[step]
        batch = whole.rows(*world.cuts[step][rank])
        loss, (_, logits, _) = model(batch)
        columns = [own if own.dim() == 2 else own.unsqueeze(1) for own in logits.values()]
        share = loss * len(batch.labels) / max(1, len(whole.labels))
        return share, torch.cat(columns, dim=1)

    found = train(world.model, world.plan, share_of, STEPS, LR, in_place=world.rng.random() < 0.5)

    def plain_loss(step: int) -> Tensor:
        logits = world.logits(world.batches[step])
        ours = torch.cat([rank.outputs[step] for rank in found])
        torch.testing.assert_close(ours.double(), logits, **CLOSE)
        return world.loss(logits, world.batches[step].labels)

    check_equals_plain(found, world.model, plain_loss, LR)
