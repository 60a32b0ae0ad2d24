"""Two-tower retrieval: the loss against a loop, accidental hits, logQ, one collection or two, and
that it finds planted pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec import Driver, RunConfig, ScalingConfig
from rayrec.data import Feature, FeatureSchema, ParquetDataset
from rayrec.errors import ConfigError, InputError
from rayrec.models import TwoTower, TwoTowerTrain
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.callbacks import Callback
from rayrec.train.events import ProgressReport
from rayrec.train.scoring import OF_PROBABILITIES

USERS, ITEMS = 12, 8


@dataclass
class Pairs:
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def ids(**columns: torch.Tensor) -> KeyedJaggedTensor:
    values = list(columns.values())
    return KeyedJaggedTensor(
        list(columns),
        torch.cat(values),
        lengths=torch.ones(sum(map(len, values)), dtype=torch.int32),
    )


def pairs(rows: int, seed: int, positive: float = 1.0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(0, USERS, (rows,), generator=generator)
    return Pairs(
        ids(user=users, item=torch.randint(0, ITEMS, (rows,), generator=generator), age=users % 3),
        (torch.rand(rows, generator=generator) < positive).float(),
    )


def tables(*names: str) -> EmbeddingBagCollection:
    sizes = {"user": USERS, "item": ITEMS, "age": 3}
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(sizes[n], 8, f"t_{n}", feature_names=[n]) for n in names]
    )


def two_tower(collections: int = 2, normalize: bool = True) -> TwoTower:
    torch.manual_seed(0)
    if collections == 2:
        return TwoTower(tables("user", "age"), [16, 8], tables("item"), normalize=normalize)
    return TwoTower(
        tables("item", "user", "age"),
        [16, 8],
        query_features=["user", "age"],
        candidate_features=["item"],
        normalize=normalize,
    )


def loss_by_hand(model: TwoTowerTrain, batch: Pairs) -> tuple[float, list[float]]:
    query, candidate = (v.double() for v in model.two_tower(batch.sparse_features))
    items = batch.sparse_features["item"].values().tolist()
    total, log_odds = 0.0, []
    for i, label in enumerate(batch.labels.tolist()):
        score = {}
        for j in range(len(items)):
            if i == j or model.candidate_id is None or not model.mask_hits or items[i] != items[j]:
                score[j] = (query[i] @ candidate[j]).item() / model.temperature
                score[j] -= float(model.log_q[items[j]]) if model.log_q is not None else 0.0
        others = sum(math.exp(s) for j, s in score.items() if j != i)
        log_odds.append(score[i] - math.log(others))
        total += label * math.log(1 + others / math.exp(score[i]))
    return total / len(items), log_odds


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("collections", [1, 2])
@pytest.mark.parametrize("correction", ["none", "mask", "logq", "mask and logq"])
def test_the_loss_equals_a_loop_over_pairs(
    correction: str, collections: int, normalize: bool
) -> None:
    log_q = torch.rand(ITEMS).log() if "logq" in correction else None
    model = TwoTowerTrain(
        two_tower(collections, normalize),
        0.3,
        None if correction == "none" else "item",
        log_q,
        "mask" in correction,
    )
    batch = pairs(20, 1, positive=0.7)
    loss, (same_loss, logits, labels) = model(batch)
    wanted, log_odds = loss_by_hand(model, batch)
    assert loss.item() == pytest.approx(wanted, rel=1e-5) and torch.equal(loss.detach(), same_loss)
    torch.testing.assert_close(logits, torch.tensor(log_odds), rtol=1e-4, atol=1e-4)
    assert torch.equal(labels, batch.labels)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_without_negatives_give_zero_loss_and_gradients(rows: int) -> None:
    model = TwoTowerTrain(two_tower(), 0.1, "item", torch.zeros(ITEMS))
    loss, (_, logits, _) = model(pairs(rows, 0))
    loss.backward()
    assert loss.item() == 0 and logits.shape == (rows,)
    for name, p in model.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


def test_rows_with_the_same_candidate_are_no_negatives() -> None:
    batch = Pairs(
        ids(user=torch.arange(4), item=torch.full((4,), 3), age=torch.zeros(4, dtype=torch.int64)),
        torch.ones(4),
    )
    assert TwoTowerTrain(two_tower(), 0.1, "item")(batch)[0].item() == 0
    assert TwoTowerTrain(two_tower(), 0.1)(batch)[0].item() == pytest.approx(math.log(4), rel=1e-5)


@pytest.mark.parametrize("collections", [1, 2])
def test_towers_alone_give_the_vectors_of_the_pair(collections: int) -> None:
    model, batch = two_tower(collections), pairs(9, 2)
    query, candidate = model(batch.sparse_features)
    columns = {key: batch.sparse_features[key].values() for key in ("user", "item", "age")}
    torch.testing.assert_close(model.query(ids(user=columns["user"], age=columns["age"])), query)
    torch.testing.assert_close(model.candidate(ids(item=columns["item"])), candidate)
    torch.testing.assert_close(query.norm(dim=1), torch.ones(9))


def test_planted_pairs_are_found() -> None:
    """User u likes item u % ITEMS alone."""
    model = TwoTowerTrain(two_tower(), 0.1, "item")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(200):
        users = torch.randint(0, USERS, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(Pairs(ids(user=users, item=users % ITEMS, age=users % 3), torch.ones(32)))[
            0
        ].backward()
        optimizer.step()
    users = torch.arange(USERS)
    scores = (
        model.two_tower.query(ids(user=users, age=users % 3))
        @ model.two_tower.candidate(ids(item=torch.arange(ITEMS))).t()
    )
    assert torch.equal(scores.argmax(1), users % ITEMS)


def test_logq_makes_scores_estimate_what_users_take() -> None:
    """Everyone takes item 0 half of the time: corrected scores estimate log p(item), uncorrected
    ones log(p / share in batch) = 0.
    """
    shares = torch.full((ITEMS,), 0.5 / (ITEMS - 1)).index_fill(0, torch.tensor(0), 0.5)
    lead = {}
    for log_q in (None, shares.log()):
        model = TwoTowerTrain(two_tower(normalize=False), 1.0, "item", log_q, mask_hits=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            items = torch.multinomial(shares, 64, replacement=True, generator=generator)
            users = torch.randint(0, USERS, (64,), generator=generator)
            optimizer.zero_grad()
            model(Pairs(ids(user=users, item=items, age=users % 3), torch.ones(64)))[0].backward()
            optimizer.step()
        scores = (
            model.two_tower.query(ids(user=users, age=users % 3))
            @ model.two_tower.candidate(ids(item=torch.arange(ITEMS))).t()
        )
        lead[log_q is not None] = (scores[:, 0] - scores[:, 1:].mean(1)).mean().item()
    # item 0 is 7 times as likely as each other one
    assert lead[True] == pytest.approx(math.log(ITEMS - 1), abs=0.4)
    assert abs(lead[False]) < 0.4


def test_corrections_of_some_ids_are_those_of_all() -> None:
    """Ids of 64 bits have no place in a list of all; one that no batch was to have is rare."""
    log_q, listed = torch.rand(ITEMS).log(), torch.tensor([0, 2, 3])
    rest = [item for item in range(ITEMS) if item not in listed.tolist()]
    log_q[rest] = log_q[listed].min()
    towers, batch = two_tower(), pairs(40, 1, positive=0.7)
    assert {*batch.sparse_features["item"].values().tolist()} & {*rest}
    whole = TwoTowerTrain(towers, 0.3, "item", log_q)
    part = TwoTowerTrain(towers, 0.3, "item", log_q[listed], log_q_ids=listed)
    assert torch.equal(whole(batch)[0], part(batch)[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_sizes is empty"):
        TwoTower(tables("user"), [], tables("item"))
    with pytest.raises(ConfigError, match="one collection serves both"):
        TwoTower(tables("user", "item"), [4])
    with pytest.raises(ConfigError, match=r"candidate tower reads 'year'"):
        TwoTower(tables("user", "item"), [4], query_features=["user"], candidate_features=["year"])
    with pytest.raises(ConfigError, match="query tower has no features"):
        TwoTower(tables("user", "item"), [4], query_features=[], candidate_features=["item"])
    with pytest.raises(ConfigError, match="temperature=0"):
        TwoTowerTrain(two_tower(), 0)
    with pytest.raises(ConfigError, match="candidate_id"):
        TwoTowerTrain(two_tower(), 1, log_q=torch.zeros(ITEMS))
    kjt = KeyedJaggedTensor(
        ["user", "age", "item"], torch.zeros(4, dtype=torch.int64), lengths=torch.tensor([1, 1, 2])
    )
    with pytest.raises(InputError, match="2 ids in 1 rows"):
        TwoTowerTrain(two_tower(), 1, "item")(Pairs(kjt, torch.ones(1)))
    # as many ids as rows, and each would be that of another row
    kjt = KeyedJaggedTensor(
        ["user", "age", "item"],
        torch.zeros(6, dtype=torch.int64),
        lengths=torch.tensor([1, 1, 1, 1, 2, 0]),
    )
    with pytest.raises(InputError, match="it needs one in each"):
        TwoTowerTrain(two_tower(), 1, "item")(Pairs(kjt, torch.ones(2)))


def test_a_run_tells_no_score_of_a_probability_that_no_model_gives(tmp_path: Path) -> None:
    """The logits are about the candidates of a batch, and the larger it is, the lower they are."""
    features = tuple(Feature(name=name, column=name) for name in ("user", "item"))
    sizes = {"user": USERS, "item": ITEMS}
    schema = FeatureSchema(
        label="label",
        features=features,
        tables=tuple(
            EmbeddingBagConfig(size, 8, f"t_{name}", feature_names=[name])
            for name, size in sizes.items()
        ),
    )
    drawn = pairs(64, 3, positive=0.5)
    columns = {name: drawn.sparse_features[name].values() for name in sizes}
    columns["label"] = drawn.labels
    table = pa.table({name: values.numpy() for name, values in columns.items()})
    pq.write_table(table, tmp_path / "rows.parquet")

    def model() -> TwoTowerTrain:
        return TwoTowerTrain(TwoTower(tables("user"), [8], tables("item")), 0.1)

    rows, windows = ParquetDataset(str(tmp_path / "rows.parquet"), schema), []

    class Seen(Callback):
        def on_window(self, report: ProgressReport, trainer: object = None) -> None:
            windows.append(report)

    run = RunConfig(global_batch_size=32, steps=4, progress="off", callbacks=(Seen(),))
    driver = Driver(model, rows, ScalingConfig(num_workers=0), run, eval_data=rows)
    metrics = driver.fit().metrics
    assert 0 < metrics["auc"] < 1 and windows[-1].auc is not None
    assert windows[-1].ne is None and "ne" not in windows[-1].scores
    assert not set(OF_PROBABILITIES) & set(metrics)
