"""Sparse optimizers row by row in Python floats, and random lookup groups: what the kernels are
compared with.

Written from the published formulas, one row at a time, and knowing nothing of the product's code
but the fields of an optimizer.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import GroupKey, LookupGroup, Slot, Use
from rayrec.layout import DataType, Shard, Storage
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RMSprop,
    RowWiseAdagrad,
    SparseOptimizer,
)

Row = list[float]
ON_DEVICE = Storage()
# what an option of an optimizer may be, where it has that option
DRAWN = {
    "eps": [1e-3, 1e-6],
    "beta1": [0.0, 0.9],
    "beta2": [0.5, 0.999],
    "momentum": [0.0, 0.9],
    "eta": [0.001, 0.1],
    "alpha": [0.5, 0.99],
}
# those that FBGEMM has a CUDA kernel for
FBGEMM_OPTIMIZERS = sorted(
    name for name, kind in SPARSE_OPTIMIZERS.items() if kind.fbgemm and kind.fbgemm.on_cuda
)


def norm(row: Row) -> float:
    return math.sqrt(sum(x * x for x in row))


def mean_square(row: Row) -> float:
    return sum(x * x for x in row) / len(row)


def reference_row(o: SparseOptimizer, t: int, w: Row, g: Row, state: dict) -> Row:
    """The new weights of one row; `state` holds lists or floats by name and is written."""
    lr, decay, mode = o.lr, getattr(o, "weight_decay", 0.0), getattr(o, "weight_decay_mode", None)
    if o.max_row_norm is not None and norm(g) > o.max_row_norm:
        g = [x * o.max_row_norm / norm(g) for x in g]
    if mode == "l2":
        g = [x + decay * y for x, y in zip(g, w, strict=True)]
    shrink = 1 - lr * decay if mode == "decoupled" else 1.0
    if isinstance(o, SGD):
        return [shrink * y - lr * x for x, y in zip(g, w, strict=True)]
    if isinstance(o, Adagrad):
        state["momentum1"] = [s + x * x for s, x in zip(state["momentum1"], g, strict=True)]
        return [
            shrink * y - lr * x / (math.sqrt(s) + o.eps)
            for s, x, y in zip(state["momentum1"], g, w, strict=True)
        ]
    if isinstance(o, RowWiseAdagrad):
        state["momentum1"] += mean_square(g)
        return [
            shrink * y - lr * x / (math.sqrt(state["momentum1"]) + o.eps)
            for x, y in zip(g, w, strict=True)
        ]
    if isinstance(o, RMSprop):
        state["momentum1"] = [
            o.alpha * v + (1 - o.alpha) * x * x for v, x in zip(state["momentum1"], g, strict=True)
        ]
        return [
            shrink * y - lr * x / (math.sqrt(v) + o.eps)
            for v, x, y in zip(state["momentum1"], g, w, strict=True)
        ]
    if isinstance(o, LarsSGD):
        below = norm(g) + decay * norm(w)
        rate = lr * o.eta * norm(w) / below if below else 0.0
        state["momentum1"] = [
            o.momentum * m + rate * (x + decay * y)
            for m, x, y in zip(state["momentum1"], g, w, strict=True)
        ]
        return [y - m for m, y in zip(state["momentum1"], w, strict=True)]
    assert isinstance(o, (Adam, LAMB))
    state["momentum1"] = [
        o.beta1 * m + (1 - o.beta1) * x for m, x in zip(state["momentum1"], g, strict=True)
    ]
    if isinstance(o, PartialRowWiseAdam):
        state["momentum2"] = o.beta2 * state["momentum2"] + (1 - o.beta2) * mean_square(g)
        second = [state["momentum2"]] * len(w)
    else:
        second = state["momentum2"] = [
            o.beta2 * v + (1 - o.beta2) * x * x for v, x in zip(state["momentum2"], g, strict=True)
        ]
    u = [
        m / (1 - o.beta1**t) / (math.sqrt(v / (1 - o.beta2**t)) + o.eps)
        for m, v in zip(state["momentum1"], second, strict=True)
    ]
    if isinstance(o, LAMB):
        u = [x + decay * y for x, y in zip(u, w, strict=True)]
        ratio = norm(w) / norm(u) if norm(u) else 0.0
        return [y - lr * ratio * x for x, y in zip(u, w, strict=True)]
    return [shrink * y - lr * x for x, y in zip(u, w, strict=True)]


class ReferenceTable:
    """One shard in float64 lists."""

    def __init__(self, weight: Tensor, optimizer: SparseOptimizer) -> None:
        self.weight: list[Row] = weight.double().tolist()
        width = weight.shape[1]
        zero = {"row": lambda: 0.0, "element": lambda: [0.0] * width}
        self.state = [
            {n: zero[per]() for n, per in optimizer.state_widths.items()} for _ in self.weight
        ]

    def update(self, optimizer: SparseOptimizer, t: int, grads: dict[int, Row]) -> None:
        for row, g in grads.items():
            self.weight[row] = reference_row(optimizer, t, self.weight[row], g, self.state[row])

    def tensor(self, name: str | None = None) -> Tensor:
        """The weights, or the state of a name."""
        return torch.tensor(
            self.weight if name is None else [s[name] for s in self.state], dtype=torch.float64
        )


@dataclass
class Work:
    """A lookup group with the means to make its batches."""

    group: LookupGroup
    rng: random.Random
    generator: torch.Generator

    def batch(self, num_bags: int) -> GroupIds:
        """Ragged bags with empty ones and repeated ids."""
        ids, lengths = [], []
        for slot in self.group.slots:
            longest = self.rng.choice([0, 1, 4])
            for _ in range(num_bags):
                lengths.append(self.rng.randint(0, longest))
                ids += [self.rng.randrange(len(slot.shard.rows)) for _ in range(lengths[-1])]
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        offsets[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        weights = (
            torch.rand(len(ids), generator=self.generator) if self.group.key.weighted else None
        )
        return GroupIds(torch.tensor(ids, dtype=torch.int64), offsets, weights)

    def grad(self, num_bags: int) -> Tensor:
        return torch.randn(num_bags, self.group.width, generator=self.generator)

    def fill(self, *lookups) -> None:
        """The same random rows in every lookup."""
        for states in zip(*(lookup.shard_states() for lookup in lookups), strict=True):
            value = torch.randn(states[0].weight.shape, generator=self.generator)
            for state in states:
                state.weight.copy_(value)


def random_work(
    seed: int,
    optimizer: SparseOptimizer,
    data_type: DataType = DataType.FP32,
    weighted: bool | None = None,
    rows: int = 9,
    storage: Storage = ON_DEVICE,
    odd: bool = True,
) -> Work:
    """Shards of several widths, odd ones among them, and at most `rows` rows, some with two slots,
    as a function of `seed`.

    Args:
        odd: whether widths may be no multiples of 4, which FBGEMM's module refuses.
    """
    rng, narrower = random.Random(seed), random.Random(~seed)
    weighted = rng.random() < 0.4 if weighted is None else weighted
    shards: list[Shard] = []
    slots: list[Slot] = []
    for i in range(rng.randint(1, 5)):
        first_row, first_col = rng.randint(0, 5), 4 * rng.randint(0, 2)
        width = 4 * rng.choice([1, 2, 2, 3]) - odd * narrower.choice([0, 0, 0, 1, 2, 3])
        shards.append(
            Shard(
                f"t{i}",
                range(first_row, first_row + rng.randint(1, rows)),
                range(first_col, first_col + width),
                0,
            )
        )
        for f in range(rng.randint(1, 2)):
            slots.append(
                Slot(
                    Use(len(slots), 0, f"t{i}", f"f{i}{f}", 0, first_col + width),
                    shards[-1],
                    0,
                    len(slots),
                )
            )
    key = GroupKey(
        collection=0,
        carrier="pooled",
        data_type=data_type,
        weighted=weighted,
        storage=storage,
        optimizer=optimizer,
        sequence=False,
        width=0,
        odd=any(len(shard.cols) % 4 for shard in shards),
    )
    return Work(
        LookupGroup(key, tuple(shards), tuple(slots)), rng, torch.Generator().manual_seed(seed)
    )


def summed_gradients(
    group: LookupGroup, routed: GroupIds, grad: Tensor, limit: float | None = None
) -> list[dict[int, Row]]:
    """Per shard, row -> sum over its ids of (weight times) the gradient of the id's bag."""
    num_bags = grad.shape[0]
    if limit is not None:
        grad = grad.clamp(-limit, limit)
    found: list[dict[int, Row]] = [{} for _ in group.shards]
    offsets, column = routed.offsets.tolist(), 0
    for s, slot in enumerate(group.slots):
        rows = found[group.shards.index(slot.shard)]
        for b in range(num_bags):
            g = grad[b, column : column + slot.width].double()
            for n in range(offsets[s * num_bags + b], offsets[s * num_bags + b + 1]):
                scale = 1.0 if routed.weights is None else float(routed.weights[n])
                row = int(routed.ids[n])
                rows[row] = [
                    x + scale * float(y)
                    for x, y in zip(rows.get(row, [0.0] * slot.width), g, strict=True)
                ]
        column += slot.width
    return found


def pooled(group: LookupGroup, weights: list[Tensor], routed: GroupIds) -> Tensor:
    """(bags, sum of slot widths) float64, bag by bag."""
    num_bags = (routed.offsets.numel() - 1) // len(group.slots)
    offsets, parts = routed.offsets.tolist(), []
    for s, slot in enumerate(group.slots):
        table, part = (
            weights[group.shards.index(slot.shard)],
            torch.zeros(num_bags, slot.width, dtype=torch.float64),
        )
        for b in range(num_bags):
            for n in range(offsets[s * num_bags + b], offsets[s * num_bags + b + 1]):
                part[b] += (1.0 if routed.weights is None else routed.weights[n].double()) * table[
                    routed.ids[n]
                ]
        parts.append(part)
    return torch.cat(parts, 1)


def random_optimizer(name: str, rng: random.Random) -> SparseOptimizer:
    """Any mixture of options of one optimizer."""
    options: dict = {"lr": rng.choice([0.01, 0.3])}
    kind = SPARSE_OPTIMIZERS[name]
    for option, values in DRAWN.items():
        if hasattr(kind, option):
            options[option] = rng.choice(values)
    if rng.random() < 0.6:
        options["weight_decay"] = rng.choice([0.01, 0.5])
        if hasattr(kind, "weight_decay_mode"):
            options["weight_decay_mode"] = rng.choice(["l2", "decoupled"])
    options |= {
        "max_gradient": rng.choice([None, None, 0.3]),
        "max_row_norm": rng.choice([None, None, 0.8]),
    }
    return kind(**options)
