"""`Scorer`: logits of a trained module for rows that have no labels yet.

A training module gives a loss and the logits that it came from. Of the click models of rayrec the
part that makes the logits is known and called alone. Any other module is called with labels of
zero, and its loss is not used.

    # B rows of the batch, I dense columns, K outputs of all tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.data import Batch
from rayrec.errors import ConfigError
from rayrec.models import (
    DIN,
    DeepFMTrain,
    DLRMTrain,
    HSTURanking,
    MultiTaskTrain,
    NextItemTrain,
    TwoTowerTrain,
)
from rayrec.models.dlrm_parts import logits_of_batch
from rayrec.quant import configs_of
from rayrec.serve.next_item import Top, item_scores, top_items
from rayrec.serve.readers import UserOnce
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

Outputs = tuple[tuple[str, str], ...]
ONE_BINARY: Outputs = (("", "binary"),)
ONE_RANKING: Outputs = (("", "ranking"),)  # of a next-item model, whose scores stay what they are


class Scorer(nn.Module):
    """Logits of a module: (B, I) and ids -> one tensor per output.

    Args:
        model: the training module; forward(batch) -> (loss, (loss, logits, labels)).
        labels: label columns of the schema, which any other module than rayrec's own is given.
        outputs: name and kind of each output of a module that is not rayrec's own.
    Raises:
        ConfigError: its logits depend on the other rows of the batch.
    """

    def __init__(self, model: nn.Module, labels: int = 1, outputs: Outputs = ONE_BINARY) -> None:
        super().__init__()
        if isinstance(model, TwoTowerTrain):
            raise ConfigError(
                "the logits of TwoTowerTrain depend on the other rows of a batch. Export a module "
                "of yours whose logits are the products of the two towers."
            )
        self.model, self._labels = model, labels
        self.outputs = outputs
        if isinstance(model, MultiTaskTrain):
            self.outputs = tuple((task.name, task.kind) for task in model.tasks)
        if isinstance(model, NextItemTrain):
            self.outputs = ONE_RANKING

        # rayrec's own models pass ids to the collections unchanged
        self._is_click = isinstance(model, (DLRMTrain, DeepFMTrain))
        self.is_own = self._is_click or isinstance(model, MultiTaskTrain)

    def forward(
        self,
        dense: Tensor,
        ids: KeyedJaggedTensor,
        sequences: Mapping[str, JaggedTensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the logits of each output: (B,), or (B, classes); of a next-item model those of
        all items that the rows have, row after row.

        Raises:
            ConfigError: the output of the module is not that of a training module.
        """
        if self._is_click:
            return (self._logits(dense, ids, sequences).squeeze(-1),)
        if isinstance(self.model, MultiTaskTrain):
            sizes = [task.outputs for task in self.model.tasks]
            parts = self._logits(dense, ids, sequences).split(sizes, dim=1)
            tasks = zip(self.model.tasks, parts, strict=True)
            return tuple(p if task.classes is not None else p.squeeze(1) for task, p in tasks)
        batch = self._batch(dense, ids, sequences or {})
        if isinstance(self.model, NextItemTrain):
            return (item_scores(self.model.model, batch),)
        return self._by_training(batch)

    def user_once(self, are_bags: bool) -> UserOnce | None:
        """Return when the module takes the bags of a user once; None if never.

        Args:
            are_bags: all its collections are pooled.
        """
        below = self.model.model if self.is_own else None
        if type(below) is DIN:
            beside = {name for own in below.beside.values() for name in own}
            return UserOnce(frozenset(below.candidates), frozenset({*below.histories, *beside}))
        if type(below) is HSTURanking:
            bags = below.embedding_bag_collection
            # a candidate may be pooled in the context, too
            tables = [] if bags is None else configs_of(bags)
            context = frozenset(name for table in tables for name in table.feature_names)
            return UserOnce(frozenset(below.candidates), context, alone=True)
        return UserOnce() if self.is_own and are_bags else None

    def _logits(
        self, dense: Tensor, ids: KeyedJaggedTensor, sequences: Mapping[str, JaggedTensor] | None
    ) -> Tensor:
        """Return the logits of the model below the loss, (B, outputs)."""
        model: Any = self.model.model
        if hasattr(model, "forward_batch"):
            return logits_of_batch(model, self._batch(dense, ids, sequences or {}))
        logits: Tensor = model(dense, ids)  # an exported program has no batch
        return logits

    def top(
        self, dense: Tensor, ids: KeyedJaggedTensor, sequences: Mapping[str, JaggedTensor], top: Top
    ) -> tuple[Tensor, Tensor]:
        """Return ids and scores of the best items for each row, both (B, k)."""
        assert isinstance(self.model, NextItemTrain), "a next-item model ranks items"
        return top_items(self.model.model, self._batch(dense, ids, sequences), top)

    def _batch(
        self, dense: Tensor, ids: KeyedJaggedTensor, sequences: Mapping[str, JaggedTensor]
    ) -> Batch:
        """Return a batch with labels of zero."""
        rows = dense.shape[0]
        return Batch(
            dense_features=dense,
            sparse_features=ids,
            labels=torch.zeros((rows, self._labels) if self._labels > 1 else rows),
            global_rows=max(1, rows),
            sequences=sequences,
        )

    def _by_training(self, batch: Batch) -> tuple[Tensor, ...]:
        given: Any = self.model(batch)
        try:
            _, (_, logits, _) = given
        except (TypeError, ValueError):
            raise ConfigError(
                f"{type(self.model).__name__} gives {type(given).__name__}; a model to export "
                "gives (loss, (loss, logits, labels)), as in training."
            ) from None
        if isinstance(logits, Tensor):
            logits = {self.outputs[0][0]: logits}
        names = [name for name, _ in self.outputs]
        if not isinstance(logits, Mapping) or set(names) != set(logits):
            raise ConfigError(
                f"{type(self.model).__name__} gives logits of {list(logits)} and the tasks are "
                f"{names}; give tasks=, those of the run."
            )
        return tuple(logits[name] for name in names)


def probabilities(kind: str, logits: Tensor) -> Tensor:
    """Turn logits into predictions: a probability, probabilities of classes, or a value."""
    if kind == "binary":
        return logits.sigmoid()
    return logits.softmax(1) if kind == "multiclass" else logits
