"""Artifacts of dynamic tables: they score as the run evaluates, and unknown ids are zeros."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.errors import ArtifactError, InputError
from rayrec.serve import Predictor
from tests.dynamic_clicks import RULE, TABLE, write
from tests.unit.running_replica import running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("users"))


def trained(folder: Path, text: bool = False) -> Path:
    """Data, a run of a model with one dynamic table, and the scores of its last checkpoint."""
    write(folder / "data", TABLE | {"dynamic": RULE}, text)
    small = ["--set", "model.dense_layers=[8]", "--set", "run.global_batch_size=100"]
    words = ["--data", str(folder / "data"), "--local"]
    assert main(["train", *words, "--checkpoint-dir", str(folder / "run"), *small]) == 0
    out = ["--out", str(folder / "scores")]
    assert main(["predict", f"{folder}/run@latest", *words, *out]) == 0
    return folder


def served(folder: Path, name: str, *words: str) -> Path:
    out = folder / name
    assert main(["export", f"{folder}/run@latest", str(out), *words]) == 0
    return out


@pytest.mark.parametrize(("dtype", "error"), [("fp32", 1e-6), ("int8", 5e-3), ("int4", 5e-2)])
def test_an_artifact_scores_as_the_run_evaluates(folder: Path, dtype: str, error: float) -> None:
    data = ["--data", str(folder / "data")]
    predictor = Predictor.load(served(folder, dtype, "--dtype", dtype, *data))
    rows = pq.read_table(folder / "data" / "eval" / "part.parquet")
    wanted = pq.read_table(folder / "scores")["score"].to_numpy()
    got = predictor.predict(rows).numpy()
    assert np.abs(got - wanted).max() < error
    assert np.ptp(wanted) > 0.05


def test_an_unknown_id_is_a_row_of_zeros(folder: Path) -> None:
    predictor = Predictor.load(served(folder, "zeros"))
    (collection,) = predictor.collections.values()
    (ids,) = (collection.packed.ids_of(0),)
    assert ids is not None
    known = ids.keys[ids.keys != -1]
    assert 20 < len(known) <= 64
    extremes = [-(2**63), 2**63 - 1, 0, -2]
    rows = predictor.read([{"d": 0.5, "user": one} for one in [*extremes, int(known[0])]])
    pooled = collection(rows.ids).values()
    assert not pooled[:4].any() and pooled[4].any()
    row = int(ids.find(known[:1]))
    assert torch.equal(pooled[4], collection.packed.unpacked(0)[row])
    with pytest.raises(InputError, match="any number of 64 bits but -1"):
        predictor.predict([{"d": 0.5, "user": -1}])
    unsigned = predictor.predict([{"d": 0.5, "user": 2**63 + 5}])
    assert torch.equal(unsigned, predictor.predict([{"d": 0.5, "user": 5 - 2**63}]))
    for users in ([2**64], [2**63, -5]):
        with pytest.raises(InputError, match=r"'user' of .* holds a number beyond 64 bits"):
            predictor.predict([{"d": 0.5, "user": one} for one in users])


def test_a_file_of_ids_that_is_not_sound_is_refused(folder: Path) -> None:
    out = served(folder, "damaged")
    (path,) = (out / "tables").glob("*-ids.arrow")
    keys = pa.ipc.open_file(path).read_all()["key"].to_numpy().copy()
    keys[:] = keys.max()
    schema = pa.schema([pa.field("key", pa.int64(), nullable=False)])
    with pa.ipc.new_file(path, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(keys)], schema=schema))
    with pytest.raises(ArtifactError, match="sha256 is not the manifest's"):
        Predictor.load(out)
    with pytest.raises(ArtifactError, match="gives two rows to one id"):
        Predictor.load(out, verify=False)


def test_text_is_scored_at_a_server_as_the_run_evaluates_it(tmp_path: Path) -> None:
    folder = trained(tmp_path, text=True)
    rows = pq.read_table(folder / "data" / "eval" / "part.parquet").slice(0, 40)
    wanted = pq.read_table(folder / "scores")["score"].to_numpy()[:40]
    predictor = Predictor.load(served(folder, "text", "--dtype", "fp32"))
    with running(predictor) as server, server.client() as client:
        got = client.predict(rows)
    assert np.abs(np.asarray(got) - wanted).max() < 1e-6
    assert rows["user"].type == "string" and np.ptp(wanted) > 0.02


def test_a_server_counts_ids_without_a_row(folder: Path) -> None:
    predictor = Predictor.load(served(folder, "counted"))
    (ids,) = predictor.weights.ids().values()
    known = int(ids.keys[ids.keys != -1][0])
    of_table = '{table="t_user"}'
    with running(predictor) as server, server.client() as client:
        assert server.numbers()[f"rayrec_serve_missed_ids_total{of_table}"] == 0
        for users in ([12345, known, known], [-7, 12345]):
            client.predict([{"d": 0.5, "user": one} for one in users])
        told = server.numbers()
    assert told[f"rayrec_serve_missed_ids_total{of_table}"] == 3
    assert told[f"rayrec_serve_ids{of_table}"] == ids.known()


def test_text_where_ids_are_numbers_is_unknown_and_changes_nothing_else(folder: Path) -> None:
    predictor = Predictor.load(served(folder, "texts"))
    (ids,) = predictor.weights.ids().values()
    known = ids.keys[ids.keys != -1][:3].tolist()
    numbers, texts = ([{"d": 0.5, "user": kind(one)} for one in known] for kind in (int, str))
    of_table = '{table="t_user"}'
    missed, held = f"rayrec_serve_missed_ids_total{of_table}", f"rayrec_serve_ids{of_table}"
    with running(predictor) as server, server.client() as client:
        wanted, before = client.predict(numbers), server.numbers()
        (unknown,) = client.predict([{"d": 0.5, "user": 12345}])
        assert np.array_equal(client.predict(texts), [unknown] * 3)
        assert np.array_equal(client.predict(numbers), wanted) and unknown not in wanted
        told = server.numbers()
    assert (before[missed], told[missed]) == (0, 1 + 3)
    assert told[held] == before[held] == ids.known()
