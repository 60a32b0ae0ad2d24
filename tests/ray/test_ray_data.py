"""`RayDataset`: pipelines of Ray Data, read and trained on with real ranks."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FeatureSchema, ParquetDataset
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import (
    CheckpointConfig,
    Driver,
    OptimizerConfig,
    RayDataset,
    Result,
    RunConfig,
    ScalingConfig,
)
from rayrec.errors import ConfigError, InputError
from tests.ray import worlds

pytest.importorskip("pandas", reason="Ray Data needs pandas")
import ray.data

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True)
def quiet() -> None:
    ray.data.DataContext.get_current().enable_progress_bars = False


def schema_of(clicks: SyntheticPaths) -> FeatureSchema:
    return FeatureSchema.load(clicks.schema)


def shifted(block: pa.Table) -> pa.Table:
    """A preprocessing step: one column is scaled, and a helper column dropped."""
    place = block.column_names.index("d_0")
    return block.set_column(place, "d_0", pa.array(block["d_0"].to_numpy() * 0.5))


def pipeline(clicks: SyntheticPaths, blocks: int = 7) -> ray.data.Dataset:
    rows = pq.read_table(clicks.train)
    size = -(-rows.num_rows // blocks)
    parts = [rows.slice(i * size, size).combine_chunks() for i in range(blocks)]
    return ray.data.from_arrow(parts).map_batches(shifted, batch_format="pyarrow")


def rows_of(batch: Any) -> list[str]:
    """Each row of a batch as a digest of all that the model sees of it."""
    out, ids = [], batch.sparse_features
    offsets, n = ids.offsets(), batch.rows
    for i in range(n):
        digest = hashlib.sha256(batch.labels[i].numpy().tobytes())
        digest.update(batch.dense_features[i].numpy().tobytes())
        for f in range(len(ids.keys())):
            low, high = offsets[f * n + i], offsets[f * n + i + 1]
            digest.update(ids.values()[low:high].numpy().tobytes() + b"|")
        out.append(digest.hexdigest())
    return out


@pytest.mark.slow
def test_the_rows_are_those_of_the_pipeline_for_any_number_of_ranks(clicks: SyntheticPaths) -> None:
    """The reference is the same table, changed by plain Arrow and read from a file."""
    schema = schema_of(clicks)
    data = RayDataset(pipeline(clicks), schema, num_streams=3, shuffle_rows=64)
    assert data.num_rows == 6007 and data.num_batches(512) == 12
    whole = [rows_of(batch) for batch in data.loader(0, 1, 512, seed=5, epoch=2)]
    parts = [list(data.loader(rank, 3, 512, seed=5, epoch=2)) for rank in range(3)]
    for t, wanted in enumerate(whole):
        assert sorted(wanted) == sorted(row for part in parts for row in rows_of(part[t]))
    resumed = data.loader(0, 1, 512, seed=5, epoch=2, start_batch=9)
    assert [rows_of(batch) for batch in resumed] == whole[9:]
    assert [rows_of(b) for b in data.loader(0, 1, 512, seed=6, epoch=2)] != whole


@pytest.mark.slow
def test_the_rows_keep_their_order_and_their_values(clicks: SyntheticPaths, tmp_path: Path) -> None:
    schema = schema_of(clicks)
    pq.write_table(shifted(pq.read_table(clicks.train)), tmp_path / "part.parquet")
    told = ParquetDataset(str(tmp_path), schema).loader(0, 1, 700, shuffle=False, ordered=True)
    data = RayDataset(pipeline(clicks), schema)
    seen = data.loader(0, 1, 700, shuffle=False, ordered=True, with_rows=True)
    for wanted, got in zip(told, seen, strict=True):
        assert rows_of(wanted) == rows_of(got)
    assert got.origin is not None and data.files[got.origin.file[-1]].path.startswith("block 6 of")


@pytest.mark.slow
def test_a_pipeline_that_is_made_again_is_the_same_data(clicks: SyntheticPaths) -> None:
    schema = schema_of(clicks)
    first = RayDataset(pipeline(clicks), schema)
    assert RayDataset(pipeline(clicks), schema).fingerprint() == first.fingerprint()
    others = [
        RayDataset(pipeline(clicks, blocks=6), schema),
        RayDataset(pipeline(clicks).map_batches(shifted, batch_format="pyarrow"), schema),
        RayDataset(pipeline(clicks), schema, num_streams=4),
    ]
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def train(clicks: SyntheticPaths, data: RayDataset, steps: int, **run: Any) -> Result:
    """Train on two ranks."""
    options = {
        "steps": steps,
        "sparse_optimizer": OptimizerConfig(name="rowwise_adagrad", lr=0.05),
        "dense_optimizer": OptimizerConfig(name="adagrad", lr=0.01),
        "progress": "off",
        "timeout_s": 30.0,
    }
    config = RunConfig(global_batch_size=512, **options, **run)
    scaling = ScalingConfig(num_workers=2, cpus_per_worker=1)
    return Driver(worlds.recipe(clicks), data, scaling, config, eval_data=data).fit()


@pytest.mark.slow
def test_two_ranks_train_on_a_pipeline(clicks: SyntheticPaths) -> None:
    result = train(clicks, RayDataset(pipeline(clicks), schema_of(clicks)), 36)
    assert (result.steps, result.rows, result.metrics["rows"]) == (36, 3 * 6007, 6007)
    assert result.metrics["auc"] > 0.6


@pytest.mark.slow
def test_a_run_resumes_a_pipeline_that_is_made_again(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    schema = schema_of(clicks)
    saved: dict[str, Any] = {
        "storage_path": str(tmp_path),
        "checkpoint": CheckpointConfig(every_n_steps=8),
    }
    whole = train(clicks, RayDataset(pipeline(clicks), schema), 12, name="whole", **saved)
    train(clicks, RayDataset(pipeline(clicks), schema), 8, name="half", **saved)
    saved |= {"name": "half", "resume_from": "latest"}
    resumed = train(clicks, RayDataset(pipeline(clicks), schema), 12, **saved)
    assert resumed.steps == 12
    # the same rows in the same order, so the same sums
    assert resumed.metrics["logloss"] == whole.metrics["logloss"]
    with pytest.raises(ConfigError, match="was trained on other data"):
        train(clicks, RayDataset(pipeline(clicks, blocks=5), schema), 14, **saved)


def ratings(**columns: Any) -> dict[str, Any]:
    base = {
        "label": np.zeros(40),
        "row": np.arange(40),
        "d1": np.zeros(40),
        "user": np.arange(40),
        "genres": np.tile(np.arange(3), (40, 1)),
    }
    return base | columns


@pytest.fixture(scope="module")
def small() -> FeatureSchema:
    sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
    try:
        from arrow_files import SCHEMA
    finally:
        sys.path.pop(0)
    return SCHEMA


@pytest.mark.slow
def test_numpy_and_pandas_batches_are_taken(small: FeatureSchema) -> None:
    rows = ray.data.range(40, override_num_blocks=2)
    tensors = rows.map_batches(lambda b: ratings(), batch_size=None, batch_format="numpy")
    (batch,) = RayDataset(tensors.limit(40), small).loader(0, 1, 40, shuffle=False, ordered=True)
    assert batch.sparse_features["genres"].to_dense()[7].tolist() == [0, 1, 2]
    frames = tensors.map_batches(
        lambda frame: frame.assign(d1=frame["d1"] + 2), batch_format="pandas"
    )
    batch = next(RayDataset(frames, small).loader(0, 1, 40))
    assert batch.dense_features[:, 1].tolist() == [2.0] * 40


def fails(block: Any) -> Any:
    raise RuntimeError("the scale is not set")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            fails,
            r"the pipeline of the Ray dataset failed: RuntimeError: the scale is not set\.$",
            marks=pytest.mark.slow,
        ),
        (lambda b: {"label": np.zeros(40)}, r"'row' is missing \(block 0 of the Ray dataset\)"),
        pytest.param(
            lambda b: ratings(user=np.arange(40) * 100),
            r"'user'.* holds id 1000 in row 10 of block",
            marks=pytest.mark.slow,
        ),
        (lambda b: ratings(d1=np.full(40, np.nan)), "column 'd1' holds nan in row 0 of block"),
        (lambda b: ratings(user=np.arange(40) * 1.0), "'user' has type double; ids are integers"),
        (lambda b: ratings(genres=np.ones((40, 2, 2), np.int64)), "'genres' has type .*Tensor"),
        (lambda b: {n: v[:0] for n, v in ratings().items()}, "has . blocks and no rows"),
    ],
)
def test_what_training_could_not_take_is_said_before_it(
    small: FeatureSchema, change: Any, message: str
) -> None:
    rows = ray.data.range(40, override_num_blocks=1)
    with pytest.raises(InputError, match=message) as raised:
        RayDataset(rows.map_batches(change, batch_size=None, batch_format="numpy"), small)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", [[1, 2], "data/clicks", None])
def test_what_is_no_pipeline_is_refused(small: FeatureSchema, what: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes a ray\.data\.Dataset, not"):
        RayDataset(what, small)


def test_sizes_are_checked_before_the_pipeline_runs(small: FeatureSchema) -> None:
    rows = ray.data.range(5).map_batches(fails)
    with pytest.raises(ConfigError, match="num_streams=0"):
        RayDataset(rows, small, num_streams=0)


def test_a_bad_label_is_named_by_block_and_row(small: FeatureSchema) -> None:
    """Any number may be a label; that it is a click only the loader knows."""
    labels = np.zeros(40)
    labels[random.Random(0).randrange(40)] = 2
    rows = ray.data.range(40, override_num_blocks=1)
    pipe = rows.map_batches(lambda b: ratings(label=labels), batch_size=None, batch_format="numpy")
    data = RayDataset(pipe, small)
    bad = int(labels.argmax())
    with pytest.raises(InputError, match=rf"'label' holds 2 in row {bad} of 'block 0 of the Ray"):
        list(data.loader(0, 1, 40, binary_labels=True))
