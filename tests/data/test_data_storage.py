"""A storage that refuses while data are written: one line, and what was there stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayrec.cli.main import main
from rayrec.data.converted import new_data_set
from rayrec.errors import SaveError
from tests.limits import files_up_to

ROWS = ("--rows", "20000", "--eval-rows", "2000")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "clicks"
    assert main(["make-data", str(folder), "--rows", "300", "--eval-rows", "100"]) == 0
    return folder


def test_a_full_disk_is_one_line_that_names_the_folder_and_leaves_the_old_data(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(made)
    with files_up_to(100_000):
        code = main(["make-data", str(made), *ROWS, "--overwrite"])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 1 and line.startswith(f"failed: cannot write the data to {made}: ")
    assert contents(made) == before
    assert main(["make-data", str(made), *ROWS, "--overwrite"]) == 0


def test_a_folder_that_was_deleted_meanwhile_is_no_half_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "clicks"
    with pytest.raises(SaveError, match="No such file"), new_data_set(folder, False) as partial:
        (partial / "train").mkdir()
        shutil.rmtree(folder)
    assert not folder.exists()


def test_a_part_that_cannot_move_leaves_all_old_parts_in_their_places(made: Path) -> None:
    before = contents(made)
    says = r"The old data, or a part of them, are in .*converting"
    with pytest.raises(SaveError, match=says), new_data_set(made, True) as partial:
        for name in ("train", "eval"):
            (partial / name).mkdir()
            (partial / name / "part-00000.parquet").write_bytes(b"new")
        (partial / "schema.json").write_text("{}")
        # the third part has no place to go to: a folder is no file
        (partial / "old-schema.json" / "inside").mkdir(parents=True)
    shutil.rmtree(partial)
    assert contents(made) == before


@pytest.mark.parametrize("moves", range(1, 7))
def test_a_user_who_ends_it_between_two_moves_finds_all_old_parts(
    made: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    before, done, rename = contents(made), list[Path](), Path.rename

    def end(own: Path, to: Path) -> Path:
        """Move, and end after so many moves."""
        moved = rename(own, to)
        done.append(moved)
        if len(done) == moves:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", end)
    with pytest.raises(KeyboardInterrupt), new_data_set(made, True) as partial:
        for name in ("train", "eval"):
            (partial / name).mkdir()
            (partial / name / "part-00000.parquet").write_bytes(b"new")
        (partial / "schema.json").write_text("{}")
    assert contents(made) == before
