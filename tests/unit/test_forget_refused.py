"""What `rayrec forget` refuses, in one line, with nothing changed; and how it reads keys."""

from __future__ import annotations

import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.checkpoint.manifest import Manifest
from rayrec.cli.main import main
from rayrec.data import Feature, FeatureSchema
from rayrec.driver.run_folder import held
from rayrec.erasure.forget import forget
from rayrec.erasure.keys import KeyFile, TableSize
from rayrec.erasure.windows import StoredWindows
from rayrec.errors import ConfigError, DamagedCheckpointError, InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig
from tests.data.plain_hashes import scalar_hash, scalar_id
from tests.unit.chain_worlds import save_chain
from tests.unit.checkpoint_worlds import make_truth, one_rank_plan

USER = TableSize("t_user", 0, True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints of table "t", and a key file beside it."""
    truth = make_truth(random.Random(0), "t", 20, 4, "row")
    manager = CheckpointManager(str(tmp_path / "run"))
    save_chain(random.Random(0), manager, [truth], one_rank_plan([truth]), 3)
    (tmp_path / "keys.csv").write_text("t\n3\n5\n")
    return tmp_path / "run"


def contents(run: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_a_run_that_trains_is_refused_with_what_to_do(run: Path) -> None:
    with (
        held(str(run), print),
        pytest.raises(ConfigError, match=r"is in use by .*End it by SIGTERM, so that it saves"),
    ):
        forget(run, run.parent / "keys.csv")
    forget(run, run.parent / "keys.csv")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_folder_around_or_inside_of_a_run_is_refused(run: Path, is_open: bool) -> None:
    (run / "events.jsonl").touch()
    shutil.copytree(run / "step-00000001", run / "other" / "step-00000001")
    (run.parents[1] / "keys.csv").write_text("t\n3\n")
    with held(str(run), print) if is_open else nullcontext():
        before = contents(run)
        for folder, why in (
            (run.parent, "holds the folder"),
            (run / "other", "lies in the folder"),
        ):
            with pytest.raises(ConfigError, match=rf"{why} of a run; name that: {run}\."):
                forget(folder, run.parents[1] / "keys.csv")
        assert contents(run) == before


@pytest.mark.parametrize(
    ("folder", "keys", "says"),
    [
        (".", "t\n20\n", "takes ids in [0, 20)"),
        (".", "t\n-1\n", "takes ids in [0, 20)"),
        (".", "t\nword\n", "'t'"),
        (".", "s\n3\n", "by which no table has rows; name columns as one of t."),
        (".", "t\n", "holds no key"),
        (".", "t,t\n3,4\n", "keys.csv has several columns 't'; leave one of them."),
        ("step-00000002", "t\n3\n", "name the folder around it"),
        ("nowhere", "t\n3\n", "is no folder"),
        ("step-00000002/tables", "t\n3\n", "holds no checkpoint, artifact or publication"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    run: Path, folder: str, keys: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "keys.csv").write_text(keys)
    before = contents(run)
    assert main(["forget", "--keys", str(run.parent / "keys.csv"), str(run / folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert contents(run) == before and not (run / ".erasure").exists()


def test_keys_may_not_lie_in_the_run(run: Path) -> None:
    (run / "keys.csv").write_text("t\n3\n")
    with pytest.raises(ConfigError, match=r"where its keys would stay"):
        forget(run, run / "keys.csv")


def test_another_file_system_and_another_kind_of_file_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/run is on another file system"):
        forget("s3://bucket/run", run.parent / "keys.csv")
    (run.parent / "keys.txt").write_text("t\n3\n")
    with pytest.raises(ConfigError, match=r"keys\.txt is of no known kind"):
        forget(run, run.parent / "keys.txt")


def test_a_link_to_another_place_is_refused(run: Path) -> None:
    (run.parent / "elsewhere").mkdir()
    (run / "published").symlink_to(run.parent / "elsewhere")
    with pytest.raises(ConfigError, match=r"published is a link to .*elsewhere, where rows would"):
        forget(run, run.parent / "keys.csv")


def test_files_that_nobody_else_may_read_stay_so(run: Path) -> None:
    (file,) = (run / "step-00000003").rglob("*.arrow")
    before = file.stat().st_ino
    file.chmod(0o600)
    forget(run, run.parent / "keys.csv")
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_ino != before


def test_a_damaged_checkpoint_ends_it_before_anything_changes(run: Path) -> None:
    (file,) = (run / "step-00000003").rglob("*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = contents(run)
    with pytest.raises(DamagedCheckpointError, match=r"step-00000003"):
        forget(run, run.parent / "keys.csv")
    assert contents(run) == before


def test_what_an_unfinished_save_has_left_goes_too(run: Path) -> None:
    left = run / "step-00000009" / "tables" / "t"
    left.mkdir(parents=True)
    (left / "r0-20-c0-4.arrow").write_bytes(b"rows")
    receipt, _ = forget(run, run.parent / "keys.csv")
    assert not (run / "step-00000009").exists() and receipt.not_read == ()


def schema(feature: Feature, dynamic: DynamicConfig | None) -> FeatureSchema:
    table = EmbeddingBagConfig(100, 4, "t_user", feature_names=[feature.name], dynamic=dynamic)
    return FeatureSchema(label="label", features=(feature,), tables=(table,))


def test_keys_become_the_ids_that_they_were_in_training(tmp_path: Path) -> None:
    words, numbers = ["anna", "bob smith", "anna", None], [7, -(2**63), None, 7]
    by_hash = schema(Feature(name="user", column="user_id"), DynamicConfig())
    in_buckets = schema(Feature(name="user", column="user_id", hash_buckets=100), None)
    pq.write_table(pa.table({"user_id": words}), tmp_path / "words.parquet")
    feather.write_feather(pa.table({"user": numbers}), tmp_path / "numbers.feather", "uncompressed")
    views = pa.table({"user_id": pa.array(words, pa.string_view())})
    feather.write_feather(views, tmp_path / "views.feather", "uncompressed")
    (tmp_path / "words.csv").write_text("user_id\nanna\nbob smith\n")
    for name in ("words.parquet", "words.csv", "views.feather"):
        file = KeyFile(str(tmp_path / name))
        found = file.ids([by_hash], [])["t_user"]
        assert found.ids.tolist() == sorted(map(scalar_id, (b"anna", b"bob smith")))
        assert not found.shared
        found = file.ids([in_buckets], [])["t_user"]
        assert found.ids.tolist() == sorted(scalar_hash(w) % 100 for w in (b"anna", b"bob smith"))
        assert found.shared
    found = KeyFile(str(tmp_path / "numbers.feather")).ids([by_hash], [])["t_user"]
    assert found.ids.tolist() == [-(2**63), 7]
    for words in (["true", "false"], ["2026-11-26", "2026-11-27"], ["12:30:00", "12:31:00"]):
        (tmp_path / "odd.csv").write_text("\n".join(["user_id", *words]))
        found = KeyFile(str(tmp_path / "odd.csv")).ids([by_hash], [])["t_user"]
        assert found.ids.tolist() == sorted(scalar_id(word.encode()) for word in words)
    # an empty cell of a column that has fewer keys than another is no key
    for text in ("user_id,t_user\nann,1\n,2\n", "user_id,t_user\n2026-11-26,1\n,2\n"):
        (tmp_path / "odd.csv").write_text(text)
        hashes = KeyFile(str(tmp_path / "odd.csv")).hashes("")
        assert {name: len(keys) for name, keys in hashes.items()} == {"user_id": 1, "t_user": 2}


def test_schemas_that_read_a_column_differently_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.csv").write_text("user\n3\n")
    one = schema(Feature(name="user", column="user"), None)
    other = schema(Feature(name="user", column="user", hash_buckets=100), None)
    file = KeyFile(str(tmp_path / "keys.csv"))
    assert file.ids([one, one], [])["t_user"].ids.tolist() == [3]
    with pytest.raises(ConfigError, match=r"read the column 'user' differently"):
        file.ids([one, other], [])
    with pytest.raises(InputError, match=r"cannot be read"):
        KeyFile(str(tmp_path / "none.csv"))
    (tmp_path / "latin.csv").write_bytes("größe\n3\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin.csv cannot be read: .*codec"):
        KeyFile(str(tmp_path / "latin.csv"))


def test_notes_of_refused_rows_go_also_where_no_row_has_a_key(run: Path) -> None:
    stream = run / "stream"
    (stream / "refused").mkdir(parents=True)
    pq.write_table(pa.table({"other": [1]}), stream / "window-00000000-x.parquet")
    (stream / "window-00000000.json").write_text("{}")
    (stream / "refused" / "window-00000000.json").write_text("[]")
    manifest = max(run.glob("step-*")) / "manifest.json"
    now = Manifest.from_bytes(manifest.read_bytes(), str(manifest))
    table = EmbeddingBagConfig(20, 4, "t", feature_names=["t"])
    feature = Feature(name="t", column="key")
    schema = FeatureSchema(label="label", features=(feature,), tables=(table,))
    extras = {**now.extras, "stream_schema": schema.to_json()}
    manifest.write_bytes(replace(now, extras=extras).to_bytes())
    receipt, _ = forget(run, run.parent / "keys.csv")
    assert sorted(path.name for path in stream.iterdir()) == [
        "window-00000000-x.parquet",
        "window-00000000.json",
    ]
    (note,) = (one for one in receipt.files if one.path.startswith("stream"))
    assert note.path == "stream/refused/window-00000000.json" and note.after is None


def test_a_note_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    assert not StoredWindows(tmp_path).has_notes()
    (tmp_path / "refused" / ".rayrec-x1").write_text("[")
    assert StoredWindows(tmp_path).has_notes()
