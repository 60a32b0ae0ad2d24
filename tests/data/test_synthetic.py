"""Planted truth: the rows follow the stated probabilities, repeat by seed, and can be learnt."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch

from rayrec.data import FeatureSchema, ParquetDataset, RandomRecDataset
from rayrec.data.planted import Planted, SyntheticConfig
from rayrec.data.synthetic import check_room, write_synthetic
from rayrec.errors import ConfigError
from rayrec.metrics import BinaryMetrics, PlantedScores
from rayrec.sparse import check_ids

SMALL = SyntheticConfig(
    rows_train=70_000, rows_eval=20_000, num_features=6, num_lists=1, num_dense=2, dim=4, cap=50
)


@pytest.mark.parametrize("shuffled", [False, True])
def test_files_hold_the_planted_rows_and_the_truth_scores_them(tmp_path, shuffled):
    config = replace(SMALL, shuffle_labels=shuffled)
    paths = write_synthetic(tmp_path, config)
    schema, truth = FeatureSchema.load(paths.schema), PlantedScores.load(paths.truth)
    assert ParquetDataset(paths.train, schema).num_rows == 70_000
    data = ParquetDataset(paths.eval, schema, num_streams=1)
    (batch,) = data.loader(0, 1, 20_000, shuffle=False)
    rows = Planted(config).chunk(1, 0, 20_000)
    assert batch.labels.tolist() == rows.labels.tolist()
    assert np.array_equal(batch.dense_features.numpy(), rows.dense)
    for f, (values, offsets) in enumerate(rows.ids):
        bags = batch.sparse_features[f"cat_{f}"]
        assert np.array_equal(bags.values().numpy(), values)
        assert np.array_equal(
            bags.lengths().numpy(), np.ones(20_000) if offsets is None else np.diff(offsets)
        )
    metrics = BinaryMetrics()
    metrics.update(torch.from_numpy(rows.logits), batch.labels)
    scores = metrics.compute()
    assert (truth.rows, truth.base_rate) == (20_000, scores.base_rate)
    if shuffled:
        assert (truth.bayes_auc, truth.bayes_ne) == (0.5, 1.0)
        # 5 sigma of an uninformative score: sqrt((n + p) / 12np), 5,000 clicks in 20,000
        assert abs(scores.auc - 0.5) < 5 * 0.0047
    else:
        assert truth.bayes_auc == pytest.approx(scores.auc, abs=scores.auc_error)
        assert truth.bayes_ne == pytest.approx(scores.ne, abs=1e-6)


def test_equal_configs_write_equal_rows_and_other_seeds_do_not(tmp_path):
    def table(name: str, config: SyntheticConfig):
        return ds.dataset(write_synthetic(tmp_path / name, config).train).to_table()

    assert table("a", SMALL).equals(table("b", SMALL))
    assert not table("a", SMALL).equals(table("c", replace(SMALL, seed=1)))


@pytest.mark.seeds(range(3))
def test_labels_follow_the_planted_probabilities(seed):
    """In each tenth of the rows by true probability, clicks are within 5 sigma of what the
    probabilities sum to.
    """
    rows = Planted(replace(SMALL, seed=seed)).chunk(0, 3, 65_536)
    p = 1 / (1 + np.exp(-rows.logits))
    for tenth in np.array_split(np.argsort(p), 10):
        sigma = np.sqrt((p[tenth] * (1 - p[tenth])).sum())
        assert abs(rows.labels[tenth].sum() - p[tenth].sum()) < 5 * sigma
    assert abs(p.mean() - 0.25) < 0.01


def test_the_defaults_leave_room_to_be_good_and_to_be_bad():
    """Bayes AUC between 0.80 and 0.85, ids skewed but not alone: the commonest id of a large column
    has 5 to 30% of the rows.
    """
    planted = Planted(SyntheticConfig())
    rows = planted.chunk(1, 0, 65_536)
    metrics = BinaryMetrics()
    metrics.update(torch.from_numpy(rows.logits), torch.from_numpy(rows.labels))
    assert 0.80 < metrics.compute().auc < 0.85
    assert 0.05 < np.bincount(rows.ids[planted.user].values).max() / 65_536 < 0.3
    assert planted.cardinalities[5] == 24 and max(planted.cardinalities) == 2000


def test_a_model_of_the_right_form_learns_the_truth_from_the_files(tmp_path):
    """Only main effects planted, so an additive model suffices: two epochs of it come within 0.01
    of the Bayes AUC.
    """
    config = replace(SMALL, rows_train=120_000, low_rank=0.0, cross=0.0, dense=0.0)
    paths = write_synthetic(tmp_path, config)
    schema, truth = FeatureSchema.load(paths.schema), PlantedScores.load(paths.truth)
    effects = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(t.num_embeddings, 1, mode=t.pooling.value.lower())
        for t in schema.tables
    )
    bias = torch.nn.Parameter(torch.zeros(()))
    for table in effects:
        torch.nn.init.zeros_(table.weight)

    def logits(batch):
        bags = batch.sparse_features.to_dict().values()
        columns = [
            table(bag.values(), bag.offsets()[:-1].long())
            for table, bag in zip(effects, bags, strict=True)
        ]
        return torch.cat(columns, 1).sum(1) + bias

    optimizer = torch.optim.Adam([*effects.parameters(), bias], lr=0.02)
    for epoch in range(2):
        for batch in ParquetDataset(paths.train, schema).loader(0, 1, 1000, epoch=epoch):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(
                logits(batch), batch.labels
            ).backward()
            optimizer.step()
    metrics = BinaryMetrics()
    with torch.no_grad():
        for batch in ParquetDataset(paths.eval, schema).loader(0, 1, 5000, shuffle=False):
            metrics.update(logits(batch), batch.labels)
    assert abs(truth.bayes_auc - metrics.compute().auc) < 0.01


@pytest.mark.parametrize(
    "bad",
    [{"num_features": 3}, {"rows_train": 0}, {"base_rate": 1.0}, {"num_lists": 3}, {"cap": 5}],
)
def test_impossible_configs_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        replace(SMALL, **bad)


def test_shares_beyond_one_are_refused():
    with pytest.raises(ConfigError, match="shares"):
        replace(SMALL, low_rank=0.6, cross=0.5)


FORKS = """
import subprocess, sys, threading
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import write_synthetic
config = SyntheticConfig(rows_train=300_000, rows_eval=1000)
making = threading.Thread(target=write_synthetic, args=(sys.argv[1], config))
making.start()
while making.is_alive():
    subprocess.Popen(["true"], preexec_fn=int).wait()
"""


@pytest.mark.slow
def test_rows_are_made_while_another_thread_forks(tmp_path: Path) -> None:
    """Ray starts its processes by fork while a job makes its data; threads of BLAS would not
    survive that.
    """
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], timeout=120, check=True, env=env)
    assert (tmp_path / "truth.json").exists()


def test_rows_that_no_disk_holds_are_refused_before_any_is_made(tmp_path):
    huge = replace(SMALL, rows_train=10**16)
    with pytest.raises(ConfigError, match=r"rows need about 1\d\d PB of disk, and .* has .* free"):
        write_synthetic(tmp_path / "not" / "there", huge)
    assert not list(tmp_path.iterdir())
    check_room(tmp_path, SMALL)


def test_random_batches_repeat_and_stay_in_their_bounds():
    options = {"hash_sizes": [5, 900], "ids_per_features": [1, 4], "num_dense": 3}
    made = RandomRecDataset(["a", "b"], 6, manual_seed=1, num_batches=5, **options)
    first = [batch.sparse_features.values() for batch in made]
    again = [batch.sparse_features.values() for batch in made]
    same = RandomRecDataset(["a", "b"], 6, manual_seed=1, num_generated_batches=5, **options)
    assert len(made) == len(first) == 5
    for mine, other, batch in zip(first, again, same, strict=False):
        ids = batch.sparse_features
        assert torch.equal(mine, other) and torch.equal(mine, ids.values())
        assert ids["a"].lengths().max() <= 1 and ids["b"].lengths().max() <= 4
        check_ids(ids, {"a": 5, "b": 900})
        assert batch.dense_features.shape == (6, 3) and batch.rows == batch.global_rows == 6
        assert set(batch.labels.tolist()) <= {0.0, 1.0}
    repeated = RandomRecDataset(["a"], 4, num_generated_batches=2, num_batches=3)
    one, two, three = repeated
    assert one is three and one is not two
    with pytest.raises(ConfigError, match="hash_sizes has 2 numbers for 1 keys"):
        RandomRecDataset(["a"], 4, hash_sizes=[1, 2])
    with pytest.raises(ConfigError, match="num_generated_batches=0"):
        RandomRecDataset(["a"], 4, num_generated_batches=0)
