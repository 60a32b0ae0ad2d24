"""The model without sharding, on the CPU.

It has rayrec's unsharded collections, dense gradients, and optimizers in float64. The formulas of
`rayrec.spec.optimizers` are written out once more, for the rows that a batch touches, so that a
GPU's kernels are compared with definitions and not with other kernels.
"""

# U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.layout import BaseEmbeddingConfig, DataType, EmbeddingConfig
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
)
from rayrec.sparse import KeyedJaggedTensor

State = dict[str, Tensor]


class Collection(NamedTuple):
    """One collection of a case: its tables, and whether ids have weights."""

    tables: tuple[BaseEmbeddingConfig, ...]
    weighted: bool = False


class Case(NamedTuple):
    """Collections that are trained together."""

    name: str
    collections: tuple[Collection, ...]

    @property
    def tables(self) -> list[BaseEmbeddingConfig]:
        """Of all collections."""
        return [table for collection in self.collections for table in collection.tables]

    def build(self, device: str) -> Model:
        """The unsharded model; on "meta" without rows."""
        return Model(self, device)

    def batch(self, rows: int, longest: int, seed: int, repeats: int = 4) -> KeyedJaggedTensor:
        """A ragged batch on the CPU: empty bags, repeated ids, weights where they are wanted.

        Args:
            rows: bags of each key.
            longest: ids of a bag, at most.
            repeats: how often an id is drawn in the mean, about.
        """
        rng = np.random.default_rng(seed)
        limits: dict[str, int] = {}
        for table in self.tables:
            for feature in table.feature_names:
                known = limits.get(feature, table.num_embeddings)
                limits[feature] = min(known, table.num_embeddings)
        ids, lengths = [], []
        for limit in limits.values():
            sizes = rng.integers(0, longest + 1, rows)
            pool = rng.integers(0, limit, max(1, int(sizes.sum()) // repeats))
            ids.append(rng.choice(pool, int(sizes.sum())))
            lengths.append(sizes)
        values = torch.from_numpy(np.concatenate(ids).astype(np.int64))
        weights = None
        if any(collection.weighted for collection in self.collections):
            weights = torch.from_numpy(rng.random(values.numel(), np.float32))
        sizes = torch.from_numpy(np.concatenate(lengths).astype(np.int32))
        return KeyedJaggedTensor(list(limits), values, weights, sizes).sync()


class Model(nn.Module):
    """A case's collections; its forward is one vector of all their outputs."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        made = []
        for tables, weighted in case.collections:
            where = torch.device(device)
            if isinstance(tables[0], EmbeddingConfig):
                made.append(EmbeddingCollection(list(tables), device=where))
            else:
                made.append(EmbeddingBagCollection(tables, is_weighted=weighted, device=where))
        self.collections = nn.ModuleList(made)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        """(values of all outputs,): collection by collection."""
        outputs = []
        for collection in self.collections:
            output = collection(kjt)
            if isinstance(output, dict):
                outputs += [jagged.values().reshape(-1) for jagged in output.values()]
            else:
                outputs.append(output.values().reshape(-1))
        return torch.cat(outputs)


class Reference:
    """A case trained without sharding.

    Args:
        optimizer: of all tables.
        seed: of initial values, as that of a sharded model.
    Attributes:
        weights: (rows, D) float64 by table. state: by table and name.
    """

    def __init__(self, case: Case, optimizer: SparseOptimizer, seed: int) -> None:
        self.case, self.optimizer, self.iteration = case, optimizer, 0
        torch.manual_seed(seed)
        self._model = case.build("cpu")
        self.weights = {t.name: self._parameter(t.name).detach().double() for t in case.tables}
        self.state: dict[str, State] = {}
        for name, weight in self.weights.items():
            rows = weight.shape[:1]
            self.state[name] = {
                key: torch.zeros(rows if per == "row" else weight.shape, dtype=torch.float64)
                for key, per in optimizer.state_widths.items()
            }

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        """As `Model.forward`, without a gradient."""
        with torch.no_grad():
            return self._model(kjt)

    def step(self, kjt: KeyedJaggedTensor, target: Tensor) -> Tensor:
        """Train on the sum of output * target; returns the output before the update."""
        self._model.zero_grad(set_to_none=True)
        output = self._model(kjt)
        (output * target).sum().backward()
        self.iteration += 1
        for table in self.case.tables:
            self._update(table, kjt)
        return output.detach()

    @torch.no_grad()
    def _update(self, table: BaseEmbeddingConfig, kjt: KeyedJaggedTensor) -> None:
        ids = [kjt[feature].values() for feature in table.feature_names]
        touched = torch.cat(ids).unique()
        parameter = self._parameter(table.name)
        if parameter.grad is None or not touched.numel():
            return
        weight, state = self.weights[table.name], self.state[table.name]
        rows = {name: tensor[touched] for name, tensor in state.items()}
        gradient = parameter.grad[touched].double()
        updated = update(self.optimizer, self.iteration, weight[touched], gradient, rows)
        weight[touched] = updated.to(parameter.dtype).double()
        for name, tensor in state.items():
            tensor[touched] = rows[name]
        parameter.copy_(weight)

    def _parameter(self, table: str) -> nn.Parameter:
        names = dict(self._model.named_parameters())
        return next(p for name, p in names.items() if name.split(".")[-2] == table)


def update(o: SparseOptimizer, t: int, w: Tensor, g: Tensor, state: State) -> Tensor:
    """The new weights of touched rows; `state` is written.

    Args:
        t: updates, this one included.
        w, g: (U, D) weights and summed gradients.
    """
    if o.fbgemm is None:  # a GPU runs this very formula: its device and precision are compared
        weight = w.clone()
        o.update_rows(o.lr, t, weight, g.clone(), state)
        return weight
    decay, mode = o.weight_decay, o.decay_mode
    if decay and mode == "l2":
        g = g + decay * w
    shrink = 1.0 - o.lr * decay if mode == "decoupled" else 1.0
    if isinstance(o, SGD):
        return shrink * w - o.lr * g
    if isinstance(o, Adagrad):
        state["momentum1"] = state["momentum1"] + g * g
        return shrink * w - o.lr * g / (state["momentum1"].sqrt() + o.eps)
    if isinstance(o, RowWiseAdagrad):
        state["momentum1"] = state["momentum1"] + (g * g).mean(1)
        return shrink * w - o.lr * g / (state["momentum1"].sqrt() + o.eps)[:, None]
    if isinstance(o, LarsSGD):
        norm = w.norm(dim=1)
        below = g.norm(dim=1) + decay * norm
        rate = torch.where(below > 0, o.lr * o.eta * norm / below, 0.0)[:, None]
        state["momentum1"] = o.momentum * state["momentum1"] + rate * (g + decay * w)
        return w - state["momentum1"]
    assert isinstance(o, (Adam, LAMB))
    first = state["momentum1"] = o.beta1 * state["momentum1"] + (1 - o.beta1) * g
    square = (g * g).mean(1) if isinstance(o, PartialRowWiseAdam) else g * g
    second = state["momentum2"] = o.beta2 * state["momentum2"] + (1 - o.beta2) * square
    second = second if second.dim() == 2 else second[:, None]
    direction = first / (1 - o.beta1**t) / ((second / (1 - o.beta2**t)).sqrt() + o.eps)
    if isinstance(o, Adam):
        return shrink * w - o.lr * direction
    direction = direction + decay * w
    below = direction.norm(dim=1)
    ratio = torch.where(below > 0, w.norm(dim=1) / below, 0.0)[:, None]
    return w - o.lr * ratio * direction


def tolerance(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, float]:
    """Of comparisons: float32 sums in another order, or rows rounded to float16 at every update."""
    half = any(table.data_type is DataType.FP16 for table in tables)
    return {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 2e-4, "atol": 2e-5}
