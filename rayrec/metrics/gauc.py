"""`Gauc`: the AUC inside the rows of each user, averaged over users by their rows.

    GAUC = sum over users of rows(u) * AUC(u)  /  sum over users of rows(u)

AUC(u) is the share of pairs of a click and a non-click of the user in which the click's logit is
above; ties count half. Users whose rows are all clicks, or none, have no pairs and are left out of
both sums. It says how well rows are ordered within a user, where the plain AUC also gains from
knowing who clicks more.

All rows of a user must be at hand at once, so rows are kept until scores are merged: 24 bytes each.
AUC(u) is exact (whole numbers, no bins); the sums are float64.

Source: Zhu et al., Optimized Cost per Click in Taobao Display Advertising, KDD 2017; with rows as
weights in Zhou et al., Deep Interest Network, KDD 2018.

    # N rows, R runs of equal logits of one user, U users
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayrec.metrics.metric import Metric


class Gauc(Metric):
    """gauc@COLUMN of a binary task.

    Args:
        column: name of the column of users, or of whatever groups the rows.
    """

    whole_groups = True

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def start(self, device: torch.device) -> Tensor:
        """(2,): rows of users with both labels, and their sum of rows times AUC."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor, users: Tensor) -> None:
        """Add each user's rows times AUC, and its rows; all rows of a user come in one call."""
        if not len(users):
            return
        order = predictions.argsort()
        order = order[users[order].argsort(stable=True)]
        users_N, logits_N, clicks_N = users[order], predictions[order], labels[order] == 1
        new_user = _changes(users_N)
        runs_R = (new_user | _changes(logits_N)).nonzero().squeeze(1)
        users_U = new_user.nonzero().squeeze(1)
        clicks, others = _before(clicks_N), _before(~clicks_N)
        ends_R, ends_U = _ends(runs_R, len(users)), _ends(users_U, len(users))
        # of the same user, before the run
        first_R = users_U[new_user.long().cumsum(0)[runs_R] - 1]
        below_R = others[runs_R] - others[first_R]
        ties_R = others[ends_R] - others[runs_R]
        # twice the pairs that are right, so that a tie counts one
        right = _before((clicks[ends_R] - clicks[runs_R]) * (2 * below_R + ties_R))
        run_of_U = torch.searchsorted(runs_R, users_U)
        right_U = right[_ends(run_of_U, len(runs_R))] - right[run_of_U]
        clicks_U = clicks[ends_U] - clicks[users_U]
        others_U = others[ends_U] - others[users_U]
        pairs_U = clicks_U * others_U
        rows_U = torch.where(pairs_U > 0, clicks_U + others_U, 0)
        auc_U = right_U.double() / (2 * pairs_U).clamp(min=1)
        total = (rows_U * auc_U).sum()
        # a logit that is no number is neither above nor below another
        total = total.masked_fill(predictions.isnan().any(), float("nan"))
        state += torch.stack([rows_U.double().sum(), total])

    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the AUC of users, averaged by their rows; nan without a user of both labels, or
        where a logit was nan.
        """
        rows, total = state.tolist()
        return {f"gauc@{self.columns[0]}": total / rows if rows else float("nan")}


def _changes(values: Tensor) -> Tensor:
    """Return (N,) bool: True where a value differs from the one before it, and at the first."""
    changed = torch.ones(len(values), dtype=torch.bool, device=values.device)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _before(values: Tensor) -> Tensor:
    """(N + 1,) int64 sums of the values before each place."""
    return torch.nn.functional.pad(values.long().cumsum(0), (1, 0))


def _ends(starts: Tensor, stop: int) -> Tensor:
    """Return the end of each part, which is the start of the next one, or `stop`."""
    return torch.cat([starts[1:], starts.new_full((1,), stop)])
