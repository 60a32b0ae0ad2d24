"""Conversions for dynamic tables: ids and text as they are, one to one with the numbers that the
same conversion gives otherwise.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from jobs.convert_criteo import CATEGORIES, convert_criteo
from jobs.convert_movielens import convert_movielens
from rayrec.data import FeatureSchema, ParquetDataset
from rayrec.data.hashing import hash_integers
from rayrec.errors import ConfigError
from rayrec.layout import DynamicConfig
from tests.mistakes.sound import criteo_row, write_films

ROWS = 64


def columns_of(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = ds.dataset(folder).to_table().to_pydict()
    return found


def check_schema(path: Path, names: list[str]) -> FeatureSchema:
    schema = FeatureSchema.load(path)
    assert [(t.num_embeddings, t.dynamic) for t in schema.tables] == [
        (ROWS, DynamicConfig()) for _ in names
    ]
    assert schema.unbounded() == set(names) and not any(f.hash_buckets for f in schema.features)
    return schema


@pytest.mark.parametrize("split", ["random", "time"])
def test_films_keep_their_text_one_to_one_with_their_numbers(tmp_path: Path, split: str) -> None:
    source = tmp_path / "films"
    write_films(source)
    numbered = convert_movielens(source, tmp_path / "numbered", split=split)
    raw = convert_movielens(source, tmp_path / "raw", split=split, dynamic=ROWS)
    names = ["user", "item", "genres", "age", "gender", "occupation", "zip", "year"]
    for part in ("train", "eval"):
        mine, others = columns_of(tmp_path / "raw" / part), columns_of(tmp_path / "numbered" / part)
        assert mine.keys() == others.keys()
        for name in ("label", "rating", "time", "age"):
            assert mine[name] == others[name]
        for name in names:
            pairs = set(zip(map(str, mine[name]), map(str, others[name]), strict=True))
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert set(mine["gender"]) <= {"M", "F"} and set(mine["zip"]) == {"90"}
        assert set(mine["user"]) <= {str(user) for user in range(1, 41)}
        assert all(
            len(bag) == 2 and bag[0] in {f"genre{i}" for i in range(4)} for bag in mine["genres"]
        )
    assert raw[3:] == numbered[3:]
    schema = check_schema(raw.schema, names)
    users = len(set(columns_of(raw.train)["user"]))
    (batch,) = ParquetDataset(raw.train, schema).loader(0, 1, 2000)
    assert (
        batch.rows == 1350
        and users > 30
        and batch.sparse_features["user"].values().unique().numel() == users
    )


def test_categories_are_the_numbers_that_are_hashed_otherwise(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [criteo_row(draw) for _ in range(200)]
    for row in rows:
        row[draw.randrange(14, 40)] = ""  # a category that is not known
    (tmp_path / "log").write_text("".join("\t".join(row) + "\n" for row in rows))
    convert_criteo([tmp_path / "log"], tmp_path / "hashed", num_buckets=1000)
    raw = convert_criteo([tmp_path / "log"], tmp_path / "raw", dynamic=ROWS)
    schema = check_schema(raw.schema, list(CATEGORIES))
    for part in ("train", "eval"):
        mine = ds.dataset(tmp_path / "raw" / part).to_table()
        others = columns_of(tmp_path / "hashed" / part)
        for name in CATEGORIES:
            known = mine[name].drop_null().to_numpy()
            wanted = [value for value in others[name] if value is not None]
            assert hash_integers(known, 1000).tolist() == wanted and len(wanted) > 3
            assert mine[name].is_valid().to_pylist() == [v is not None for v in others[name]]
    assert sum(b.rows for b in ParquetDataset(raw.train, schema).loader(0, 1, 64)) == raw.rows_train
    with pytest.raises(ConfigError, match="num_buckets=9 and dynamic=64: dynamic tables take ids"):
        convert_criteo([tmp_path / "log"], tmp_path / "both", num_buckets=9, dynamic=ROWS)
