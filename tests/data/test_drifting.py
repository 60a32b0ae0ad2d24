"""Ids that are born and die: how long they live, what is planted for them, and the files."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayrec.cli.main import main
from rayrec.data import FeatureSchema, ParquetDataset
from rayrec.data.drifting import Drift
from rayrec.data.planted import CHUNK, Planted, SyntheticConfig
from rayrec.data.synthetic import write_synthetic
from rayrec.errors import ConfigError
from rayrec.metrics import PlantedScores

LIFETIME = 20_000
SMALL = SyntheticConfig(
    rows_train=70_000,
    rows_eval=20_000,
    num_features=6,
    num_lists=1,
    num_dense=2,
    dim=4,
    cap=50,
    lifetime=LIFETIME,
)
TRAIN, EVAL = 0, 1


@pytest.mark.seeds(range(4))
def test_a_place_is_held_by_one_id_at_a_time_and_by_each_for_its_lifetime(seed: int) -> None:
    drift = Drift(seed, 1000, [7, 5])
    times = np.arange(5000)
    for column, places in enumerate((7, 5)):
        seen = Counter[int]()
        for place in range(places):
            held = drift.ids(column, np.full(5000, place), times)
            changes = np.flatnonzero(np.diff(held)) + 1
            assert np.diff(changes).tolist() == [1000] * (len(changes) - 1)
            assert 4 <= len(changes) <= 5 and len(set(held.tolist())) == len(changes) + 1
            seen.update(set(held.tolist()))
        assert set(seen.values()) == {1} and -1 not in seen, "no id comes back, or is in two places"
        assert min(seen) < 0 < max(seen)
    both = [set(drift.ids(c, np.zeros(5000, np.int64), times).tolist()) for c in (0, 1)]
    assert not both[0] & both[1], "columns have ids of their own"


def test_what_is_planted_is_normal_and_of_one_kind_alone() -> None:
    """Of 100,000 ids: mean and variance within 5 sigma of 0 and 1, and kinds do not correlate."""
    drift, ids = Drift(3, 1, [1]), np.arange(-50_000, 50_000)
    one, two, other = drift.normals(0, ids), drift.normals(1, ids), Drift(4, 1, [1]).normals(0, ids)
    sigma = 100_000**-0.5
    for drawn in (one, two, other):
        assert abs(drawn.mean()) < 5 * sigma and abs(drawn.var() - 1) < 5 * 2**0.5 * sigma
        assert abs((drawn < 1).mean() - 0.8413) < 5 * sigma
    assert max(abs((one * two).mean()), abs((one * other).mean())) < 5 * sigma
    assert np.array_equal(drift.normals(0, ids[70:80]), one[70:80])


@pytest.mark.seeds(range(3))
def test_labels_follow_the_planted_probabilities_at_all_times(seed: int) -> None:
    """In each tenth of the rows by true probability, and in each tenth of time, clicks are within 5
    sigma of what the probabilities sum to; the same ids give the same logit but for dense columns.
    """
    rows = Planted(replace(SMALL, seed=seed)).chunk(TRAIN, 0, CHUNK)
    p = 1 / (1 + np.exp(-rows.logits))
    for order in (np.argsort(p), np.arange(CHUNK)):
        for tenth in np.array_split(order, 10):
            sigma = np.sqrt((p[tenth] * (1 - p[tenth])).sum())
            assert abs(rows.labels[tenth].sum() - p[tenth].sum()) < 5 * sigma
    assert 0.15 < p.mean() < 0.35 and 1.2 < rows.logits.std() < 2.1


def test_files_hold_the_events_in_the_order_of_time_and_the_truth_scores_them(
    tmp_path: Path,
) -> None:
    paths = write_synthetic(tmp_path, SMALL)
    schema, truth = FeatureSchema.load(paths.schema), PlantedScores.load(paths.truth)
    assert schema.unbounded() == set(schema.feature_names())
    planted, start, ids = Planted(SMALL), 0, set[int]()
    for part, path, count in ((TRAIN, paths.train, 70_000), (EVAL, paths.eval, 20_000)):
        data = ParquetDataset(path, schema, num_streams=1)
        (batch,) = data.loader(0, 1, 100_000, shuffle=False)
        sizes = [min(CHUNK, count - first) for first in range(0, count, CHUNK)]
        chunks = [planted.chunk(part, i, size) for i, size in enumerate(sizes)]
        assert batch.labels.tolist() == np.concatenate([c.labels for c in chunks]).tolist()
        for f in range(SMALL.num_features):
            values = np.concatenate([c.ids[f].values for c in chunks])
            assert np.array_equal(batch.sparse_features[f"cat_{f}"].values().numpy(), values)
        users = np.concatenate([c.ids[planted.user].values for c in chunks])
        for first in range(0, count, LIFETIME // 2):
            alive = set(users[first : first + 1000].tolist())
            later = set(users[first + LIFETIME + 1000 :].tolist())
            assert len(alive) <= 50 + 50 * 1000 / LIFETIME + 5 and not alive & later
        ids |= set(users.tolist())
        start += count
    # every place changes hands once in a lifetime; the rarest ids are not drawn in theirs
    assert 50 * (start / LIFETIME) * 0.8 < len(ids) <= 50 * (-(-start // LIFETIME) + 1)
    logits = np.concatenate([c.logits for c in chunks])
    labels = np.concatenate([c.labels for c in chunks])
    loss = np.logaddexp(0, np.where(labels == 1, -logits, logits)).mean()
    assert truth.rows == 20_000 and truth.bayes_logloss == pytest.approx(loss, abs=1e-9)
    assert truth.bayes_ne < 0.9, "there is something to learn"


def test_the_evaluation_rows_follow_the_training_rows(tmp_path: Path) -> None:
    """At the border of the two parts the same ids are alive; a lifetime later none of them is."""
    planted = Planted(replace(SMALL, rows_train=CHUNK, rows_eval=2 * CHUNK))
    last = planted.chunk(TRAIN, 0, CHUNK).ids[planted.user].values[-1000:]
    first, later = (planted.chunk(EVAL, i, CHUNK).ids[planted.user].values for i in (0, 1))
    assert len(set(last.tolist()) & set(first[:1000].tolist())) > 25
    assert not set(last.tolist()) & set(later.tolist())


def test_a_chunk_does_not_depend_on_those_before_it() -> None:
    whole, alone = Planted(SMALL), Planted(SMALL)
    whole.chunk(TRAIN, 0, CHUNK)
    one, two = (planted.chunk(TRAIN, 1, 4464) for planted in (whole, alone))
    assert np.array_equal(one.logits, two.logits) and np.array_equal(one.labels, two.labels)
    other = Planted(replace(SMALL, seed=1)).chunk(TRAIN, 1, 4464)
    assert not set(other.ids[0].values.tolist()) & set(one.ids[0].values.tolist())


def test_the_command_makes_a_drifting_world(tmp_path: Path) -> None:
    words = ["--rows", "3000", "--eval-rows", "500", "--lifetime", "1000", "--dim", "4"]
    assert main(["make-data", f"{tmp_path}/made", *words]) == 0
    made = write_synthetic(
        tmp_path / "same", SyntheticConfig(rows_train=3000, rows_eval=500, lifetime=1000, dim=4)
    )
    assert (tmp_path / "made" / "truth.json").read_text() == made.truth.read_text()
    for wrong in (0, 10**25):
        with pytest.raises(ConfigError, match=f"lifetime={wrong}; it must be between 1 and "):
            replace(SMALL, lifetime=wrong)
