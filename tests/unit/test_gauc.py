"""GAUC against every pair of every user, and metrics of the user's own that see columns."""

from __future__ import annotations

import math

import pytest
import torch

from rayrec.data import Batch
from rayrec.errors import ConfigError, InputError
from rayrec.metrics import Gauc, Metric, check_mergeable, metric_named
from rayrec.runs.reporting import scores_line
from rayrec.sparse import KeyedJaggedTensor
from rayrec.spec.task import Task
from rayrec.train.scoring import Scoring, by_task, check_tasks


def by_hand(logits, labels, users) -> float:
    total = weight = 0.0
    for user in set(users.tolist()):
        mine = users == user
        clicks, others = logits[mine & (labels == 1)], logits[mine & (labels == 0)]
        if len(clicks) and len(others):
            above = clicks[:, None] - others[None, :]
            auc = float((above > 0).double().mean() + 0.5 * (above == 0).double().mean())
            total, weight = total + int(mine.sum()) * auc, weight + int(mine.sum())
    return total / weight if weight else math.nan


def rows_of(seed: int):
    random = torch.Generator().manual_seed(seed)
    rows = int(torch.randint(0, 60, (), generator=random))
    logits = torch.randint(-3, 4, (rows,), generator=random).float()  # with ties
    labels = (torch.rand(rows, generator=random) < 0.4).float()
    users = torch.randint(-4, 5, (rows,), generator=random) * 2**60
    return logits, labels, users


def scored(logits, labels, users) -> float:
    metric = Gauc("user")
    state = metric.start(torch.device("cpu"))
    metric.add(state, logits, labels, users)
    return metric.scores(state)["gauc@user"]


@pytest.mark.seeds(range(60))
def test_it_is_the_mean_over_users_of_all_their_pairs(seed):
    rows = rows_of(seed)
    assert scored(*rows) == pytest.approx(by_hand(*rows), rel=1e-12, nan_ok=True)


def test_users_without_pairs_are_left_out_and_rows_are_the_weights():
    users = torch.tensor([1, 1, 2, 2, 2, 2, 3, 4])
    labels = torch.tensor([1, 0, 1, 0, 0, 0, 1, 0])
    logits = torch.tensor([0.0, 1.0, 5.0, 4.0, 3.0, 2.0, 9.0, -9.0])
    assert scored(logits, labels, users) == pytest.approx((2 * 0 + 4 * 1) / 6)
    assert math.isnan(scored(logits[6:], labels[6:], users[6:]))


def test_a_model_that_has_diverged_orders_no_rows_and_finds_no_class():
    users, labels = torch.tensor([1, 1, 2, 2]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert math.isnan(scored(torch.tensor([math.nan, 1.0, 2.0, 3.0]), labels, users))
    assert math.isnan(scored(torch.full((4,), math.nan), labels, users))
    task = Task(name="genre", kind="multiclass", classes=5)
    logits = torch.full((2, 5), math.nan)
    logits[1, 1:] = torch.tensor([9.0, 1.0, 0.0, -1.0])
    for kind in ("recall", "ndcg"):
        metric = metric_named(f"{kind}@2", task)
        state = metric.start(torch.device("cpu"))
        metric.add(state, logits, torch.tensor([0.0, 2.0]))
        assert metric.scores(state) == {f"{kind}@2": 0}


def batch_of(users, segments=None) -> Batch:
    rows = len(users)
    ids = KeyedJaggedTensor(["user"], users, lengths=torch.ones(rows, dtype=torch.int32))
    return Batch(
        dense_features=torch.zeros(rows, 0),
        sparse_features=ids,
        labels=torch.zeros(rows),
        global_rows=rows,
        groups={} if segments is None else {"segment": segments},
    )


class Clicks(Metric):
    """Clicks of one segment."""

    columns = ("segment", "user")

    def start(self, device):
        return torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, state, predictions, labels, segment, user):
        state += ((labels == 1) & (segment == 3) & (user < 10)).sum()

    def scores(self, state):
        return {"clicks_of_3": float(state[0])}


class Widest(Clicks):
    """Rows of the user with the most rows, which no sum tells."""

    def add(self, state, predictions, labels, segment, user):
        if len(user):
            state += user.unique(return_counts=True)[1].max()


def test_metrics_see_columns_batch_by_batch_and_users_whole():
    scoring = Scoring([Task(name="a", metrics=(Clicks(), "gauc@user"))], torch.device("cpu"))
    logits, labels, users = rows_of(3)
    users, segments = users.clamp(0, 9), torch.arange(len(users)) % 4
    for at in (slice(0, 20), slice(20, None)):
        outputs = by_task(scoring.tasks, logits[at], labels[at])
        scoring.add(outputs, batch_of(users[at], segments[at]))
    scores = scoring.scores(scoring.state())
    assert scores["clicks_of_3"] == float(((labels == 1) & (segments == 3)).sum())
    assert scores["gauc@user"] == pytest.approx(by_hand(logits, labels, users), rel=1e-12)
    assert f"  gauc@user {scores['gauc@user']:.5f}  ne " in scores_line(scores)
    assert check_tasks(scoring.tasks)[-2:] == ["clicks_of_3", "gauc@user"]


def test_what_a_metric_cannot_read_or_merge_is_told():
    outputs = {"a": (torch.zeros(2), torch.zeros(2))}
    scoring = Scoring([Task(name="a", metrics=(Clicks(),))], torch.device("cpu"))
    with pytest.raises(InputError, match="Clicks reads column 'segment'; the batch has the groups"):
        scoring.add(outputs, batch_of(torch.tensor([1, 2])))
    scoring = Scoring([Task(name="a", metrics=("gauc@user",))], torch.device("cpu"))
    ids = KeyedJaggedTensor(["user"], torch.arange(2), lengths=torch.tensor([2, 0]))
    batch = batch_of(torch.arange(2))
    batch.sparse_features = ids
    with pytest.raises(InputError, match="'user' as a column, and not every row has one id"):
        scoring.add(outputs, batch)
    with pytest.raises(ConfigError, match="metric Widest cannot be merged"):
        check_mergeable(Widest(), 1, None)
    with pytest.raises(ConfigError, match="gauc@user', which a regression task has not"):
        check_tasks([Task(name="a", kind="regression", metrics=("gauc@user",))])
