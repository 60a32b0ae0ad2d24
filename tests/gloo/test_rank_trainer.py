"""`RankTrainer` over real ranks equals a plain loop over `train_step`, bit for bit, and leaves no
thread behind.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data import FeatureSchema, FileDataset, ParquetDataset
from rayrec.data.scored import Predicted, ScoredFolder, scored_folder
from rayrec.distributed import DistributedModelParallel
from rayrec.optim import sparse_optimizer
from rayrec.spec.task import Task
from rayrec.train import RankTrainer, bulk, train_step
from rayrec.train.predictions import PredictionConfig
from tests.clicks import write_clicks
from tests.gloo.trainers import numbers, spec_of
from tests.ranks import RankPool


def both_loops(rank: int, world_size: int, folder: Path) -> None:
    spec = spec_of(folder, world_size)

    def one_thread_reads(step: int) -> None:
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("rayrec-") for name in names) == 1, names

    with RankTrainer(spec) as trainer:
        trainer.run(on_step=one_thread_reads)
        assert (trainer._live.cursor.epoch, trainer._live.cursor.batch) == (1, 5)
        got = numbers(trainer.model)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("prefetch", "rayrec-"))]
    torch.manual_seed(spec.seed)
    sparse = sparse_optimizer(spec.sparse_optimizer.name, spec.sparse_optimizer.lr)
    model = DistributedModelParallel(
        spec.model(), plan=spec.plan, sparse_optimizer=sparse, seed=spec.seed
    )
    dense = torch.optim.Adam(model.parameters(), lr=spec.dense_optimizer.lr, fused=True)
    done = 0
    for epoch in range(2):
        for batch in spec.data.loader(
            rank, world_size, spec.global_batch_size, seed=spec.seed, epoch=epoch
        ):  # type: ignore[union-attr]
            if done < spec.steps:
                train_step(model, dense, batch, world_size)
                done += 1
    wanted = numbers(model)
    assert got.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loop_equals_plain_steps_bit_for_bit(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    write_clicks(tmp_path)
    ranks.run(world_size, both_loops, tmp_path)


def gauc(rank: int, world_size: int, folder: Path) -> tuple[dict[str, float], list[float]]:
    """Scores of the training rows before training, and those of the windows of three steps."""
    task = Task(name="click", metrics=("gauc@day", "gauc@cat_0"))
    spec = replace(spec_of(folder, world_size), tasks=(task,), steps=3)
    schema = replace(FeatureSchema.from_json(spec.model.schema), groups=("day",))
    spec = replace(spec, data=ParquetDataset(folder / "train", schema))
    told: list[float] = []
    with RankTrainer(spec) as trainer:
        scores = trainer.evaluate(spec.data)
        trainer.run(on_event=lambda event: told.append(getattr(event, "scores", {})))
    return scores, [scores["gauc@day"] for scores in told if scores]


def test_gauc_is_the_same_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """A group's rows lie on all ranks, and in all batches."""
    write_clicks(tmp_path)
    for file in sorted((tmp_path / "train").glob("*.parquet")):
        table = pq.read_table(file)
        days = pa.array([f"day {i % 7}" for i in range(table.num_rows)])
        pq.write_table(table.append_column("day", days), file)
    one, _ = ranks.run(1, gauc, tmp_path)[0]
    assert 0.3 < one["gauc@day"] < 0.7 and one["gauc@cat_0"] != one["gauc@day"]
    found = ranks.run(3, gauc, tmp_path)
    for scores, told in found:
        for name in ("gauc@day", "gauc@cat_0", "auc"):
            # logits are sums in another order, so that few pairs may change places
            assert scores[name] == pytest.approx(one[name], abs=1e-5)
        assert told and told == found[0][1]


def predict(rank: int, world_size: int, folder: Path, out: Path) -> object:
    spec = spec_of(folder, world_size)
    data = spec.data
    assert data is not None
    with RankTrainer(spec) as trainer:
        return trainer.evaluate(data, PredictionConfig(path=str(out), keys=("cat_0",)))


def test_predictions_of_several_ranks_are_those_of_one_in_the_same_order(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The last batch has fewer rows than there are ranks, so that some ranks have none of it."""
    write_clicks(tmp_path, rows_train=1026)
    tables = {}
    for world_size in (1, 3):
        scores = ranks.run(world_size, predict, tmp_path, tmp_path / f"{world_size}.parquet")
        assert all(score == scores[0] for score in scores)
        tables[world_size] = pq.read_table(tmp_path / f"{world_size}.parquet")
    one, three = tables[1], tables[3]
    source = pq.read_table(tmp_path / "train")
    assert one["cat_0"].to_pylist() == source["cat_0"].to_pylist() and one[
        "row"
    ].to_pylist() == list(range(1026))
    for name in ("label", "file", "row", "cat_0"):
        assert three[name].to_pylist() == one[name].to_pylist()
    assert three["score"].to_pylist() == pytest.approx(one["score"].to_pylist(), abs=1e-6)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def predict_both_ways(
    rank: int, world_size: int, folder: Path, out: Path, parts: ScoredFolder
) -> object:
    """Into a folder whose files are small, and into the one file of an evaluation."""
    bulk.PART_ROWS = 300  # type: ignore[misc]
    spec = spec_of(folder, world_size)
    data = spec.data
    assert isinstance(data, FileDataset)
    with RankTrainer(spec) as trainer:
        told = trainer.predict(data.without_labels(), parts)
        trainer.evaluate(data, PredictionConfig(path=str(out / "one.parquet"), keys=("cat_0",)))
    return told


@pytest.mark.slow
def test_a_folder_of_predictions_is_cut_alike_by_any_ranks_and_equals_the_evaluation(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_clicks(tmp_path, rows_train=1026)
    for world_size in (1, 2, 3):
        out = tmp_path / str(world_size)
        out.mkdir()
        # as a driver does, before there are ranks: it tries whether the folder can be written
        rows = spec_of(tmp_path, world_size).data.without_labels()
        folder = scored_folder(out / "parts", rows, ["cat_0"], [("", "binary")])
        told = ranks.run(world_size, predict_both_ways, tmp_path, out, folder)
        assert told == [Predicted(path=str(out / "parts"), rows=1026, parts=4)] * world_size
        parts = [pq.read_table(path) for path in sorted((out / "parts").iterdir())]
        assert [part.num_rows for part in parts] == [300, 300, 300, 126]
        got, wanted = pa.concat_tables(parts), pq.read_table(out / "one.parquet")
        assert got.equals(wanted.select(["score", "cat_0"]))  # bit for bit
        assert sorted(path.name for path in out.iterdir()) == ["one.parquet", "parts"]
