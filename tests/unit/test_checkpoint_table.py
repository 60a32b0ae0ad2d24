"""pyarrow alone reads the tables; `load_table` puts rectangles together."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from rayrec.checkpoint import load_table, read_manifest
from rayrec.errors import CheckpointError, ConfigError
from rayrec.layout import DataType, TableLayout
from tests.unit.checkpoint_worlds import Truth, make_truth, save_world
from tests.worlds import plan_for

GRID = TableLayout((0, 5, 12, 30), (0, 4, 16), ((0, 1), (1, 0), (0, 0)))


def save_grid(path: str, state: str, data_type: DataType = DataType.FP32) -> Truth:
    truth = make_truth(random.Random(0), "t", 30, 16, state, data_type)
    save_world(path, [truth], plan_for(2, {"t": GRID}), batch_bytes=100)
    return truth


ALONE = """
import json, sys
import pyarrow as pa

root = sys.argv[1]
rows = {}
for entry in json.load(open(f"{root}/manifest.json"))["files"]:
    table = pa.ipc.open_file(pa.memory_map(f"{root}/{entry['path']}")).read_all()
    for row, values in zip(range(*entry["rows"]), table["weight"].to_pylist()):
        rows.setdefault(row, {}).update(zip(range(*entry["cols"]), values))
foreign = [name for name in sys.modules if name.split(".")[0] in ("rayrec", "torch")]
print(json.dumps([foreign, [[rows[r][c] for c in sorted(rows[r])] for r in sorted(rows)]]))
"""


def test_pyarrow_alone_reads_the_tables(tmp_path):
    truth = save_grid(str(tmp_path / "c"), "row")
    out = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "c")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    foreign, weight = json.loads(out.stdout)
    assert not foreign
    assert np.array_equal(np.array(weight, dtype=np.float32), truth.weight.numpy())


def test_a_file_of_bfloat16_holds_its_bits_and_says_so(tmp_path):
    truth = make_truth(random.Random(0), "t", 30, 6, "none", DataType.BF16)
    save_world(str(tmp_path), [truth], plan_for(1, {"t": TableLayout((0, 30), (0, 6), ((0,),))}))
    (entry,) = read_manifest(str(tmp_path)).files
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / entry.path))).read_all()
    field = table.schema.field("weight")
    assert field.metadata == {b"rayrec.dtype": b"bfloat16"} and field.type.value_type == pa.uint16()
    bits = table["weight"].combine_chunks().flatten().to_numpy().astype(np.uint32) << 16
    assert np.array_equal(bits.view(np.float32).reshape(30, 6), truth.weight.float().numpy())


@pytest.mark.parametrize("state", ["none", "row", "element"])
@pytest.mark.parametrize("data_type", list(DataType))
def test_load_table_is_the_whole_table(state, data_type, tmp_path):
    truth = save_grid(str(tmp_path / "c"), state, data_type)
    table = load_table(str(tmp_path / "c"), "t")
    assert table["row"].to_pylist() == list(range(30))
    assert table["weight"].type.list_size == 16
    weight = table["weight"].combine_chunks().flatten().to_numpy().reshape(30, 16)
    # Arrow has no bfloat16
    wanted = truth.weight.float() if data_type is DataType.BF16 else truth.weight
    assert weight.dtype == wanted.numpy().dtype and np.array_equal(weight, wanted.numpy())
    assert table.column_names == ["row", "weight", "momentum1"][: 2 if state == "none" else 3]
    if state == "row":
        np.testing.assert_allclose(
            table["momentum1"].to_numpy(), truth.squares.mean(1).numpy(), rtol=1e-6
        )
    if state == "element":
        momentum = table["momentum1"].combine_chunks().flatten().to_numpy().reshape(30, 16)
        assert np.array_equal(momentum, truth.squares.float().numpy())


def test_load_table_names_the_tables_that_exist(tmp_path):
    save_grid(str(tmp_path / "c"), "row")
    with pytest.raises(CheckpointError, match="no table 'u' among its 1: t"):
        load_table(str(tmp_path / "c"), "u")
    with pytest.raises(ConfigError, match="a checkpoint has path=None; it must be a text"):
        load_table(None, "t")


def test_record_batches_stay_within_their_bound(tmp_path):
    save_grid(str(tmp_path / "c"), "row")
    for entry in read_manifest(str(tmp_path / "c")).files:
        file = pa.ipc.open_file(pa.memory_map(str(tmp_path / "c" / entry.path)))
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        assert all(batch.nbytes <= 100 for batch in batches)
        assert [batch.num_rows for batch in batches] == [
            len(entry.batch_range(i)) for i in range(len(entry.marks) - 1)
        ]
