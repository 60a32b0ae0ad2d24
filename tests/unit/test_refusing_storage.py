"""Storage that refuses: typed errors, nothing left behind, and what was there as it was."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.checkpoint import CheckpointManager
from rayrec.data import FeatureSchema
from rayrec.data.origin import RowOrigin
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import write_synthetic
from rayrec.driver import PublishConfig
from rayrec.erasure.staging import Staging
from rayrec.errors import SaveError
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.publication import BASE, PUBLICATION, ChainPlace
from rayrec.storage import write_whole
from rayrec.train.predictions import PredictionConfig, PredictionWriter
from tests.limits import files_up_to, no_changes, open_folder
from tests.unit.checkpoint_worlds import make_truth, one_rank_plan, save_world
from tests.unit.local_runs import driver
from tests.unit.plan_worlds import random_plan
from tests.unit.serve_worlds import a_schema

TRUTH = make_truth(random.Random(0), "t", 6, 4, "none")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_schema_and_a_plan_that_cannot_be_written_leave_the_old_file(tmp_path: Path) -> None:
    old, new, plan = a_schema(), a_schema(weighted=True), random_plan(0)
    old.save(tmp_path / "schema.json")
    with files_up_to(20), pytest.raises(OSError, match="too large"):
        new.save(tmp_path / "schema.json")
    with files_up_to(20), pytest.raises(OSError, match="too large"):
        plan.save(tmp_path / "plan.json")
    assert names(tmp_path) == ["schema.json"]
    assert FeatureSchema.load(tmp_path / "schema.json") == old


def test_a_schema_and_a_plan_are_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    for name, one in (("schema.json", a_schema()), ("plan.json", random_plan(0))):
        (tmp_path / name).symlink_to(tmp_path / "shared" / name)
        one.save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "shared" / name).read_text() == one.to_json()
    assert names(tmp_path / "shared") == ["plan.json", "schema.json"]


def test_a_file_that_cannot_be_written_leaves_no_folder(tmp_path: Path) -> None:
    with files_up_to(20), pytest.raises(SaveError, match=r"cannot write the page to .*too large"):
        write_whole("the page", str(tmp_path / "new" / "folder" / "page.html"), "x" * 100)
    assert names(tmp_path) == []


def test_a_save_that_the_storage_refuses_says_what_to_try(tmp_path: Path) -> None:
    with (
        files_up_to(20),
        pytest.raises(SaveError, match=r"too large.*\. Make room; what was whole"),
    ):
        save_world(str(tmp_path / "step-00000001"), [TRUTH], one_rank_plan([TRUTH]), step=1)


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_typed_error() -> None:
    with open_folder() as folder:
        manager = CheckpointManager(str(folder))
        for step in (1, 2):
            save_world(manager.path(step), [TRUTH], one_rank_plan([TRUTH]), step=step)
        says = "cannot delete the old checkpoint .*step-00000001: .*num_to_keep"
        with no_changes(folder), pytest.raises(SaveError, match=says):
            manager.prune(1)
        assert manager.steps() == (1, 2)
        assert manager.prune(1) == (1,)


def test_an_old_publication_that_cannot_be_deleted_is_a_typed_error() -> None:
    with open_folder() as folder:
        chain = ChainFolder(folder)
        places = [ChainPlace(number, BASE) for number in (1, 2)]
        for place in places:
            chain.folder(place).mkdir()
            (chain.folder(place) / PUBLICATION).touch()
        says = "cannot delete the old publication .*base-00000001: .*num_to_keep"
        with no_changes(folder), pytest.raises(SaveError, match=says):
            chain.prune(1)
        assert chain.places() == places
        chain.prune(1)
        assert chain.places() == places[1:]


def test_predictions_that_cannot_be_begun_leave_no_file(tmp_path: Path) -> None:
    config = PredictionConfig(path=str(tmp_path / "new" / "scores.parquet"))
    writer = PredictionWriter(config, ["a.parquet"], 0, 1)
    origin = RowOrigin(np.zeros(2, np.int32), np.arange(2), None)
    with files_up_to(0), pytest.raises(SaveError, match=r"cannot write predictions to .*too large"):
        writer.add(torch.zeros(2), torch.zeros(2), origin)
        writer.finish()
    writer.abandon()
    assert names(tmp_path) == []


def test_an_erasure_without_room_for_its_journal_leaves_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path)
    staging.new("step-00000001").mkdir(parents=True)
    with files_up_to(20), pytest.raises(SaveError, match="cannot write the journal to"):
        staging.finish([staging.added("step-00000001")], {}, "receipt.json")
    assert names(tmp_path) == []


def test_a_publication_without_room_leaves_no_copy_of_the_tables(tmp_path: Path) -> None:
    config = SyntheticConfig(
        rows_train=2000, rows_eval=200, dim=4, num_dense=2, num_features=5, num_lists=1
    )
    clicks = write_synthetic(tmp_path / "clicks", config)
    options = {"publish": PublishConfig(every_n_steps=4)}
    driver(clicks, tmp_path / "whole", **options).fit()
    files = [path for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    program = max(path.stat().st_size for path in files if path.name == "dense.pt2")
    others = max(path.stat().st_size for path in files if path.name != "dense.pt2")
    assert others < program, "the limit is met by the program of a base alone"
    with files_up_to((others + program) // 2), pytest.raises(SaveError, match="publishing step 4"):
        driver(clicks, tmp_path / "cut", **options).fit()
    [published] = (tmp_path / "cut").rglob("published")
    assert names(published) == []
