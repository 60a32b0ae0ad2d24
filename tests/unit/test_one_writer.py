"""Of two commands that write to one place at the same time, one does, and the other says so."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data.converted import new_data_set
from rayrec.data.origin import RowOrigin
from rayrec.erasure.checkpoints import StoredCheckpoint
from rayrec.erasure.forget import forget
from rayrec.errors import ArtifactError, CheckpointError, ConfigError, SaveError
from rayrec.machine.folder_lock import folder_lock
from rayrec.serve import Predictor, export, exporting
from rayrec.train.predictions import GROUP_ROWS, PredictionConfig, PredictionWriter
from tests.unit.serve_worlds import World, a_model, a_world


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with folder_lock(folder) as first, folder_lock(folder) as second:
        assert first and not second
    with folder_lock(folder) as again:
        assert again


def test_an_export_leaves_the_folder_of_another_one_as_it_is(tmp_path: Path) -> None:
    world, out = a_world(tmp_path), tmp_path / "out"
    (out / "tables").mkdir(parents=True)
    (out / "tables" / "0000-user.arrow").write_text("of the other export")
    with folder_lock(out), pytest.raises(ArtifactError, match="another export writes to"):
        export(world.checkpoint, out)
    assert (out / "tables" / "0000-user.arrow").read_text() == "of the other export"
    # what an export that was killed left behind is nobody's
    assert export(world.checkpoint, out).sha256 == Predictor.load(out).manifest.sha256


def test_an_export_whose_folder_cannot_be_made_leaves_none_of_those_around_it(
    tmp_path: Path,
) -> None:
    world = a_world(tmp_path)
    with pytest.raises(SaveError, match=r"cannot write the artifact to .*name too long"):
        export(world.checkpoint, tmp_path / "new" / ("long" * 100))
    assert not (tmp_path / "new").exists()


def test_an_export_spoils_no_artifact_that_came_meanwhile(tmp_path: Path) -> None:
    world, out = a_world(tmp_path), tmp_path / "out"

    def model() -> torch.nn.Module:
        # the first export has looked at the folder, and the second one is quicker
        export(world.checkpoint, out)
        return a_model(world.schema)

    with pytest.raises(ArtifactError, match="already holds a complete artifact"):
        export(world.checkpoint, out, model=model, schema=world.schema)
    assert Predictor.load(out).step == 7


def a_run(folder: Path) -> tuple[World, Path]:
    """A run's folder with one checkpoint, and a file of keys beside it."""
    (folder / "keys.csv").write_text("item\n3\n")
    (folder / "run").mkdir()
    return a_world(folder / "run"), folder / "keys.csv"


def test_keys_are_not_forgotten_beside_an_export_that_has_not_ended(tmp_path: Path) -> None:
    world, keys = a_run(tmp_path)
    run = Path(world.checkpoint).parent
    before = (Path(world.checkpoint) / "manifest.json").read_bytes()
    (run / "served" / "tables").mkdir(parents=True)
    with (
        folder_lock(run / "served"),
        pytest.raises(ConfigError, match="served is being written by another process"),
    ):
        forget(run, keys)
    assert (Path(world.checkpoint) / "manifest.json").read_bytes() == before


def test_an_export_keeps_no_rows_that_were_forgotten_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, keys = a_run(tmp_path)
    out, compare = tmp_path / "served", exporting.compared

    def compared(*args: Any) -> dict[str, Any]:
        # all rows have been read, and the artifact is not there yet
        forget(Path(world.checkpoint).parent, keys)
        return compare(*args)

    monkeypatch.setattr(exporting, "compared", compared)
    with pytest.raises(CheckpointError, match="was written anew while it was exported"):
        export(world.checkpoint, out)
    assert not out.exists()


def test_an_export_that_ends_before_the_rows_are_gone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, keys = a_run(tmp_path)
    run, rewrite = Path(world.checkpoint).parent, StoredCheckpoint.rewrite

    def rewritten(*args: Any) -> str:
        export(world.checkpoint, run / "served")
        return rewrite(*args)

    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoint, "rewrite", rewritten)
        with pytest.raises(ConfigError, match="served came while keys were looked for"):
            forget(run, keys)
    receipt, _ = forget(run, keys)
    assert any(one.path.startswith("served/") for one in receipt.files)


def test_two_that_make_data_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    """The first to have all written has the folder, whoever began first."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="already holds train"), new_data_set(out, False) as slow:
        (slow / "schema.json").write_text("slow")
        with new_data_set(out, False) as quick:
            (quick / "train").mkdir()
            (quick / "train" / "part.parquet").write_text("quick")
    assert (out / "train" / "part.parquet").read_text() == "quick"
    assert sorted(path.name for path in out.iterdir()) == ["train"]


def test_data_move_into_a_folder_one_set_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        ExitStack() as other,
        pytest.raises(ConfigError, match="another process puts its data into"),
        new_data_set(out, True) as folder,
    ):
        (folder / "schema.json").write_text("mine")
        other.enter_context(folder_lock(out))
    assert not out.exists()


def test_two_files_of_predictions_at_one_path_do_not_mix(tmp_path: Path) -> None:
    config = PredictionConfig(path=str(tmp_path / "scores.parquet"))
    writers = [PredictionWriter(config, ["rows.parquet"], 0, 1) for _ in range(2)]
    for number, writer in enumerate(writers):
        rows = np.arange(GROUP_ROWS + number)  # so many are written before the end
        origin = RowOrigin(np.zeros(len(rows), np.int32), rows, None)
        writer.add(torch.full(rows.shape, number / 4), torch.zeros(rows.shape), origin)
    for number, writer in enumerate(writers):
        writer.finish()
        # each file is whole, and the last one stays
        scores = pq.read_table(config.path)["score"].to_numpy()
        assert scores.shape == (GROUP_ROWS + number,) and (scores == number / 4).all()
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]
