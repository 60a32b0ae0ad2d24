"""Rows that a metric needs by whole groups, and the columns that metrics read.

Each rank keeps predictions, labels and columns of the rows that it scored. When scores are merged,
a row goes to the rank that its group's number names, by one all-to-all. Costs 8 bytes per value.

    # B rows of a batch, N rows kept, V values of a row
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.errors import InputError
from rayrec.metrics import Metric
from rayrec.spec.task import Task


def column_of(batch: Any, name: str, rows: int, metric: Metric) -> Tensor:
    """(B,) int64: a group of the batch, or the ids of a feature that has one in each row.

    Raises:
        InputError: the batch has neither.
    """
    groups = getattr(batch, "groups", {})
    if name in groups:
        return groups[name]
    features = getattr(batch, "sparse_features", None)
    keys = [] if features is None else features.keys()
    if features is not None and name in keys:
        bags = features[name]
        one_each = bags.values().numel() == rows
        if one_each and bags.values().is_cpu:  # on a GPU the lengths would be waited for
            one_each = bool((bags.lengths() == 1).all())
        if one_each:
            return bags.values().long()
        raise InputError(
            f"metric {type(metric).__name__} reads feature {name!r} as a column, and not every row "
            "has one id of it. Name the column in the schema's 'groups'."
        )
    raise no_column(metric, name, "the batch", groups, keys)


def no_column(
    metric: Metric, name: str, where: str, groups: Iterable[str], features: Iterable[str]
) -> InputError:
    """Return the error for a metric whose column is neither a group nor a feature."""
    return InputError(
        f"metric {type(metric).__name__} reads column {name!r}; {where} has the groups "
        f"{sorted(groups)} and the features {sorted(features)[:20]}. Name the column in the "
        "schema's 'groups'."
    )


class KeptRows:
    """Rows that one rank scored, for one metric.

    Args:
        columns: number of the metric's columns; the first holds the group.
    """

    def __init__(self, task: Task, columns: int, device: torch.device) -> None:
        self._classes, self._outputs = task.classes, task.outputs
        # all as 64 bits, so that one message takes them
        self._rows = [torch.empty(0, task.outputs + 1 + columns, dtype=torch.int64, device=device)]

    def add(self, predictions: Tensor, labels: Tensor, columns: Sequence[Tensor]) -> None:
        """Keep the rows of a batch."""
        numbers = [predictions.detach().double().reshape(len(labels), -1), labels[:, None].double()]
        bits = torch.cat(numbers, dim=1).view(torch.int64)
        self._rows.append(torch.cat([bits, torch.stack(list(columns), dim=1)], dim=1))

    def brought_together(self) -> tuple[Tensor, ...]:
        """Gather the rows of this rank's groups from all ranks: predictions, labels, columns."""
        rows_NV = torch.cat(self._rows)
        self._rows = self._rows[:1]
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows_NV = _by_owner(rows_NV, rows_NV[:, self._outputs + 1])
        numbers = rows_NV[:, : self._outputs + 1].contiguous().view(torch.float64)
        predictions = numbers[:, :-1] if self._classes is not None else numbers[:, 0]
        return predictions, numbers[:, -1], *rows_NV[:, self._outputs + 1 :].unbind(1)


def _by_owner(rows_NV: Tensor, groups_N: Tensor) -> Tensor:
    """Send each row to the rank that its group has, and return those that came."""
    owners_N = groups_N.remainder(dist.get_world_size())
    counts = torch.bincount(owners_N, minlength=dist.get_world_size())
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sizes = arriving.tolist()
    out = rows_NV.new_empty(sum(sizes), rows_NV.shape[1])
    dist.all_to_all_single(out, rows_NV[owners_N.argsort(stable=True)], sizes, counts.tolist())
    return out
