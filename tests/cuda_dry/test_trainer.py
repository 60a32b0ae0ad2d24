"""`RankTrainer` on a GPU trains as on the CPU, scores and checkpoints included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.optim import SPARSE_OPTIMIZERS
from rayrec.train import OptimizerConfig, ProgressReport, RankTrainer, TrainSpec
from rayrec.train.optimizer_config import DENSE_OPTIMIZERS
from tests.cuda_dry.runs import ROWS, numbers, spec_of, write_clicks

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clicks")
    write_clicks(made)
    return made


def trained(spec: TrainSpec, device: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Numbers of the model, loss of the last window, AUC of the evaluation."""
    with RankTrainer(spec, device) as trainer:
        trainer.run()
        assert trainer.loss is not None and spec.eval_data is not None
        scores = trainer.evaluate(spec.eval_data)
        return numbers(trainer.model), trainer.loss, scores["auc"]


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, **TOLERANCE)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_a_gpu_trains_as_the_cpu(folder: Path, kind: str) -> None:
    spec = spec_of(folder, kind=kind)
    got, wanted = trained(spec, "cuda"), trained(spec, "cpu")
    assert_same(got[0], wanted[0])
    assert got[1:] == pytest.approx(wanted[1:], rel=1e-4)


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_tables_train_by_every_optimizer(folder: Path, name: str) -> None:
    spec = spec_of(folder, sparse_optimizer=OptimizerConfig(name=name, lr=0.02), steps=5)
    got, wanted = trained(spec, "cuda"), trained(spec, "cpu")
    assert got[1:] == pytest.approx(wanted[1:], rel=1e-3)


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_dense_layers_train_by_every_optimizer(folder: Path, name: str) -> None:
    spec = spec_of(folder, dense_optimizer=OptimizerConfig(name=name, lr=0.003), steps=5)
    got, wanted = trained(spec, "cuda"), trained(spec, "cpu")
    assert got[1:] == pytest.approx(wanted[1:], rel=1e-3)


def test_batches_are_read_into_pinned_memory(folder: Path) -> None:
    with RankTrainer(spec_of(folder), "cuda") as trainer:
        batch = next(trainer._live.cursor.batches())
        kjt = batch.sparse_features
        assert all(
            t.is_pinned() for t in (batch.labels, batch.dense_features, kjt.values(), kjt.lengths())
        )


def test_reports_count_every_row(folder: Path) -> None:
    reports: list[ProgressReport] = []
    with RankTrainer(replace(spec_of(folder), report_every_s=0.01), "cuda") as trainer:
        trainer.run(on_event=lambda event: reports.append(event))
        assert reports[-1].step == 11 and reports[-1].rows == trainer.rows == ROWS + 2 * 64
        assert all(0 < report.loss < 2 for report in reports)


@pytest.mark.parametrize("begins", ["cuda", "cpu"])
@pytest.mark.parametrize("sparse", ["rowwise_adagrad", "adam"])
def test_a_run_goes_on_from_its_checkpoint_on_either_device(
    folder: Path, tmp_path: Path, sparse: str, begins: str
) -> None:
    spec = spec_of(folder, sparse_optimizer=OptimizerConfig(name=sparse, lr=0.02))
    spec = replace(spec, dense_optimizer=OptimizerConfig(name="adam", lr=0.003))
    with RankTrainer(spec, begins) as whole:
        whole.run()
        wanted = numbers(whole.model)
    with RankTrainer(replace(spec, steps=5), begins) as first:
        first.run()
        path = first.save(str(tmp_path / "checkpoint"))
    for device in ("cuda", "cpu"):
        with RankTrainer(spec, device) as second:
            second.restore(path)
            assert second.step == 5
            second.run()
            got = numbers(second.model)
        if device == begins:
            assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]
        else:
            for name, value in wanted.items():
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3)


def test_a_profile_of_a_gpu_run_is_written(folder: Path, tmp_path: Path) -> None:
    from rayrec.train.profile_config import ProfileConfig

    profile = ProfileConfig(path=str(tmp_path), skip_steps=2, steps=2)
    with RankTrainer(spec_of(folder, profile=profile, steps=8), "cuda") as trainer:
        trainer.run()
        assert trainer.profile is not None and trainer.profile.device == "cuda"
        assert trainer.profile.ranks[0].step_s > 0
