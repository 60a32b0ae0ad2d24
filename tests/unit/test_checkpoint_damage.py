"""What is missing, damaged or does not fit raises a CheckpointError that names it; a rank that
fails is heard by all.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.checkpoint import (
    CheckpointManager,
    Manifest,
    ShardState,
    TableReader,
    load_table,
    read_manifest,
    restore_checkpoint,
)
from rayrec.checkpoint.shardfile import shard_path
from rayrec.errors import CheckpointError, DamagedCheckpointError, ShapeError
from rayrec.layout import EmbeddingBagConfig, Shard, ShardingPlan, data_parallel, row_wise
from tests.unit.checkpoint_worlds import (
    attempt_save,
    make_truth,
    one_rank_plan,
    save_world,
    shard_states,
)
from tests.worlds import plan_for

TRUTH = make_truth(random.Random(0), "t", 24, 8, "row")
ELEMENTS = make_truth(random.Random(1), "e", 10, 8, "element")
BARE = make_truth(random.Random(2), "bare", 10, 8, "none")
ALL = [TRUTH, ELEMENTS, BARE]


def two_ranks() -> ShardingPlan:
    return plan_for(2, {t.config.name: row_wise(t.config, range(2)) for t in ALL})


def restore(path: Path | str, **options: object) -> None:
    restore_checkpoint(str(path), shard_states(ALL, one_rank_plan(ALL), 0, fill=True), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    specs = {t.config.name: {"name": "rowwise_adagrad", "lr": 0.1} for t in (TRUTH,)}
    save_world(str(path), ALL, two_ranks(), optimizers=specs, batch_bytes=150)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.seeds(range(60))
def test_one_changed_byte_anywhere_that_is_read_is_found(seed, copy):
    rng = random.Random(seed)
    entry = rng.choice([*read_manifest(str(copy)).files, None, None])
    target = copy / (entry.path if entry else rng.choice(("dense.pt", "manifest.json")))
    data = bytearray(target.read_bytes())
    end = len(data) - (target.name == "manifest.json")  # "\n" ends the JSON
    at = rng.randrange(end)
    data[at] ^= 1 << rng.randrange(8)
    target.write_bytes(data)
    with pytest.raises(CheckpointError):
        restore(copy)
        print(f"byte {at} of {target}")


@pytest.mark.parametrize("name", ["dense.pt", "shard"])
def test_truncated_and_missing_files_are_named_before_any_row_is_written(name, copy):
    path = read_manifest(str(copy)).files[0].path if name == "shard" else name
    states = shard_states(ALL, one_rank_plan(ALL), 0, fill=True)
    os.truncate(copy / path, (copy / path).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{path} has .* truncated"):
        restore_checkpoint(str(copy), states, verify=False)
    os.remove(copy / path)
    with pytest.raises(CheckpointError, match=f"has no file {path}"):
        restore_checkpoint(str(copy), states, verify=False)
    assert all(state.weight.isnan().all() for state in states)


def test_garbage_without_verification_is_still_a_checkpoint_error(copy):
    entry = read_manifest(str(copy)).files[0]
    (copy / entry.path).write_bytes(b"\x07" * entry.num_bytes)
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(copy, verify=False)
    with pytest.raises(CheckpointError):
        load_table(str(copy), entry.table, verify=False)


@pytest.mark.parametrize("at", [0.01, 0.5, -1])
def test_a_flipped_byte_of_a_table_is_found_by_restore_and_by_load_table(copy, at):
    """The last byte lies in the footer, which no row is read from."""
    entry = read_manifest(str(copy)).files[0]
    data = bytearray((copy / entry.path).read_bytes())
    data[int(len(data) * at) if at > 0 else at] ^= 1
    (copy / entry.path).write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged.*Restore an earlier"):
        restore(copy)
    with pytest.raises(DamagedCheckpointError):
        load_table(str(copy), entry.table)


def test_a_truncated_or_missing_table_is_named_by_load_table(copy):
    entry = read_manifest(str(copy)).files[0]
    with open(copy / entry.path, "r+b") as file:
        file.truncate(entry.num_bytes - 1)
    with pytest.raises(
        DamagedCheckpointError, match=rf"{entry.path} has {entry.num_bytes - 1} bytes"
    ):
        load_table(str(copy), entry.table)
    os.remove(copy / entry.path)
    with pytest.raises(DamagedCheckpointError, match=rf"has no file {entry.path}"):
        load_table(str(copy), entry.table)


def test_a_directory_without_manifest_is_no_checkpoint(copy):
    os.remove(copy / "manifest.json")
    with pytest.raises(CheckpointError, match=r"no file manifest\.json.*not a checkpoint"):
        restore(copy)


def write_manifest(copy: Path, manifest: Manifest) -> None:
    """Write a manifest with a right checksum, as a foreign writer could."""
    (copy / "manifest.json").write_bytes(manifest.to_bytes())


def test_a_manifest_whose_rectangles_do_not_tile_is_refused(copy):
    manifest = read_manifest(str(copy))
    first, *rest = manifest.files
    hole, twice, shifted = (
        rest,
        [first, first, *rest],
        [replace(first, rows=range(1, first.rows.stop)), *rest],
    )
    for files in (hole, twice, shifted):
        write_manifest(copy, replace(manifest, files=tuple(files)))
        with pytest.raises(CheckpointError, match="do not tile"):
            restore(copy)


def test_a_manifest_cannot_name_files_outside_of_the_checkpoint(copy):
    manifest = read_manifest(str(copy))
    first, *rest = manifest.files
    for path in ("../elsewhere.arrow", "/etc/passwd", "tables/../../x"):
        write_manifest(copy, replace(manifest, files=(replace(first, path=path), *rest)))
        with pytest.raises(CheckpointError, match="outside of the checkpoint"):
            restore(copy)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other"}',
        '{"format": "rayrec.checkpoint", "version": 1}',
        "\x00\xff",
        "[" * 100_000,
    ],
)
def test_what_is_no_manifest_is_a_checkpoint_error(text, copy):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        restore(copy)


def test_another_format_version_is_refused(copy):
    text = (copy / "manifest.json").read_text().replace('"version": 1', '"version": 4', 1)
    (copy / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"format version 4.*versions 1 to 3"):
        restore(copy)


def wanted(table: str, rows: int = 4, cols: int = 8, **optimizer: torch.Tensor) -> list[ShardState]:
    return [
        ShardState(Shard(table, range(rows), range(cols), 0), torch.zeros(rows, cols), optimizer)
    ]


@pytest.mark.parametrize(
    ("states", "match"),
    [
        (wanted("nobody"), "no table 'nobody' among its 3: t, e, bare"),
        (wanted("t", rows=25), "saved as 24 x 8, and r0-25-c0-8 is wanted"),
        (wanted("t", cols=12), "saved as 24 x 8"),
        (
            wanted("t", momentum1=torch.zeros(4, 8)),
            "one value per row .row-wise., wanted is one value per element",
        ),
        (
            wanted("e", momentum1=torch.zeros(4)),
            "one value per element, wanted is one value per row",
        ),
        (
            wanted("bare", momentum1=torch.zeros(4)),
            "no optimizer state 'momentum1'; it was saved with: none",
        ),
        (
            wanted("t", momentum2=torch.zeros(4)),
            "no optimizer state 'momentum2'; it was saved with: momentum1",
        ),
        (
            wanted("t", momentum1=torch.zeros(4, dtype=torch.int64)),
            "saved as float32, wanted is int64",
        ),
    ],
)
def test_what_does_not_fit_is_named(states, match, saved):
    with pytest.raises(CheckpointError, match=match):
        restore_checkpoint(str(saved), states)


def test_a_table_that_grew_is_named_even_when_this_rank_would_fit(saved):
    table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=8, name="t", feature_names=["f"])
    with pytest.raises(CheckpointError, match=r"24 x 8 .* 100 x 8 in the model"):
        restore_checkpoint(str(saved), wanted("t"), tables=[table])


def test_another_optimizer_with_the_same_state_is_named(saved):
    specs = {"t": {"name": "rowwise_other"}}
    with pytest.raises(
        CheckpointError, match="trained with 'rowwise_adagrad', 'rowwise_other' is wanted"
    ):
        restore_checkpoint(str(saved), wanted("t", momentum1=torch.zeros(4)), optimizers=specs)
    restore_checkpoint(str(saved), wanted("t"), optimizers=specs)  # the weights alone do not care


def test_shard_states_check_their_shapes():
    with pytest.raises(ShapeError, match=r"shape \(3, 8\), not \(4, 8\)"):
        ShardState(Shard("t", range(4), range(8), 0), torch.zeros(3, 8))
    with pytest.raises(ShapeError, match=r"state 'momentum1' .* shape \(5,\)"):
        wanted("t", momentum1=torch.zeros(5))


def bad_state(rank: int) -> list[ShardState]:
    states = shard_states(ALL, two_ranks(), rank)
    return [
        replace(
            states[0], optimizer={"flags": torch.zeros(states[0].shard.shape[0], dtype=torch.bool)}
        ),
        *states[1:],
    ]


@pytest.mark.parametrize(
    ("by_rank", "match"),
    [
        (
            {1: {"shards": bad_state(1)}},
            r"writing failed on rank 1 of 2: .*'flags' of table 't' has dtype torch.bool",
        ),
        ({1: {"shards": []}}, "preparing failed on rank 1 of 2: .*in the plan but was not given"),
        (
            {1: {"step": 8}},
            r"publishing failed on rank 0 of 2 .*different steps, by rank: \[7, 8\]",
        ),
        (
            {0: {"cursor": {"at": object()}}},
            "publishing failed on rank 0 of 2: .*cursor cannot be written as JSON",
        ),
        (
            {0: {"dense_optimizer": {"f": random.Random(0)}}},
            r"writing failed on rank 0 of 2: .*random\.Random",
        ),
        ({0: {"tables": [TRUTH.config]}}, "preparing failed on rank 0 of 2: PlanError"),
    ],
)
def test_every_rank_raises_what_one_rank_failed_with_and_no_checkpoint_appears(
    by_rank, match, tmp_path
):
    ranks = attempt_save(str(tmp_path / "c"), ALL, two_ranks(), by_rank=by_rank)
    for error in ranks.errors:
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=match):
            raise error
    assert len({str(error) for error in ranks.errors}) == 1
    assert not (tmp_path / "c" / "manifest.json").exists()
    save_world(str(tmp_path / "c"), ALL, two_ranks())  # what the failed save left is replaced
    restore(tmp_path / "c")


def test_a_path_that_is_not_shared_by_the_hosts_is_found_at_save(tmp_path):
    ranks = attempt_save(
        str(tmp_path / "here"), ALL, two_ranks(), by_rank={1: {"path": str(tmp_path / "there")}}
    )
    for error in ranks.errors:
        assert (
            isinstance(error, CheckpointError)
            and "rank 0 does not see it" in str(error)
            and "shared by all hosts" in str(error)
        )


def test_a_complete_checkpoint_is_never_overwritten(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="already holds a complete checkpoint"):
        save_world(str(copy), ALL, two_ranks())
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_directory_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "tables").mkdir()
    with pytest.raises(CheckpointError, match=r"holds 'thesis\.txt'"):
        save_world(str(tmp_path), ALL, two_ranks())
    assert (tmp_path / "thesis.txt").exists() and (tmp_path / "tables").exists()


def test_replicated_tables_are_written_once(tmp_path):
    plan = plan_for(3, {"t": data_parallel(TRUTH.config, range(3))})
    (manifest, *_) = save_world(str(tmp_path / "c"), [TRUTH], plan)
    assert len(manifest.files) == 1 and len(list((tmp_path / "c").rglob("*.arrow"))) == 1


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../../evil", "/etc/passwd", "a/b", "naïve table", "x" * 400, "..%2F", "CON:*?"],
)
def test_table_names_stay_inside_the_directory(name, tmp_path):
    truth = make_truth(random.Random(4), name, 6, 4, "row")
    (manifest,) = save_world(str(tmp_path / "c"), [truth], one_rank_plan([truth]))
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.arrow")]
    assert [str(path) for path in files] == [f"c/{manifest.files[0].path}"] and len(
        files[0].parts
    ) == 4
    (state,) = shard_states([truth], one_rank_plan([truth]), 0, fill=True)
    restore_checkpoint(str(tmp_path / "c"), [state])
    assert torch.equal(state.weight, truth.weight)


def test_long_names_with_a_common_beginning_have_different_paths():
    paths = {shard_path(Shard("x" * 300 + end, range(1), range(4), 0)) for end in ("a", "b")}
    assert len(paths) == 2


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_told_as_that(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path))
    for step in (1, 2):
        save_world(manager.path(step), [BARE], one_rank_plan([BARE]), step=step)
    manifest = read_manifest(manager.path(1))
    manager.prune(1)
    with pytest.raises(CheckpointError, match=r"deleted meanwhile.*Use a newer checkpoint"):
        TableReader(manager.path(1), manifest).read_whole("bare", ["weight"])
