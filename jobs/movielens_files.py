"""The files of MovieLens-100k as columns of text, in either form, and the schema of their log.

GroupLens publishes u.data, which is tab separated, and u.user and u.item, which are separated by
'|'; none has a header, and u.item is Latin-1. Its items have a release date such as 01-Jan-1995, of
which the year is kept, and one 0 or 1 per genre (format: the README that lies beside the files).
The other form, ml-100k.inter, .user and .item, is tab separated with a header of name:type.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from rayrec.errors import InputError
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature, SequenceColumn
from rayrec.layout.tables import EmbeddingConfig

_NAMES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
)
GENRES = tuple(_NAMES.split())
RATINGS = ("user_id", "item_id", "rating", "timestamp")
USERS = ("user_id", "age", "gender", "occupation", "zip_code")
ITEMS = ("item_id", "title", "release_date", "video_release_date", "url", *GENRES)


class Films(NamedTuple):
    """Three tables of text columns, and the files of the first two.

    Items have their item_id, release_year, and class: names of genres, with spaces.
    """

    ratings_path: Path
    users_path: Path
    ratings: pa.Table
    users: pa.Table
    items: pa.Table


def read_films(root: Path) -> Films:
    """Read the folder of MovieLens-100k.

    Raises:
        InputError: the folder holds neither form, or a file cannot be read or lacks a column.
    """
    if os.path.exists(root / "u.data"):  # unlike Path.exists, no error for a name that is too long
        paths = root / "u.data", root / "u.user", root / "u.item"
        ratings, users = _read(paths[0], RATINGS, "\t"), _read(paths[1], USERS, "|")
        return Films(
            *paths[:2], ratings, users, _with_genres(_read(paths[2], ITEMS, "|"), paths[2])
        )
    if not os.path.exists(root / "ml-100k.inter"):
        raise InputError(
            f"{root} holds neither u.data nor ml-100k.inter. Point at the folder of "
            "MovieLens-100k: u.data, u.user and u.item as GroupLens publishes them, or "
            "ml-100k.inter, ml-100k.user and ml-100k.item."
        )
    paths = root / "ml-100k.inter", root / "ml-100k.user", root / "ml-100k.item"
    columns = RATINGS, USERS, ("item_id", "release_year", "class")
    return Films(*paths[:2], *map(_read, paths, columns))


def _with_genres(items: pa.Table, path: Path) -> pa.Table:
    """The items of u.item in the columns of the other form."""
    words: list[list[str]] = [[] for _ in range(items.num_rows)]
    for genre in GENRES:
        for row, flag in enumerate(items[genre].to_pylist()):
            if flag not in ("0", "1"):
                raise InputError(
                    f"{path}: row {row} holds {flag!r} for genre {genre}; it must be 0 or 1."
                )
            if flag == "1":
                words[row].append(genre)
    classes = pa.array([" ".join(genres) for genres in words], pa.string())
    years = pc.utf8_slice_codeunits(items["release_date"], -4)
    return pa.table({"item_id": items["item_id"], "release_year": years, "class": classes})


def _read(path: Path, columns: Sequence[str], delimiter: str | None = None) -> pa.Table:
    """Read columns of text.

    Args:
        delimiter: of a file without a header that holds these columns; one with a header is tab
            separated.
    """
    names = list(columns)
    try:
        if delimiter is None:
            with path.open(encoding="utf-8") as file:
                names = file.readline().rstrip("\n").split("\t")
        table = pacsv.read_csv(
            path,
            pacsv.ReadOptions(
                column_names=names,
                skip_rows=int(delimiter is None),
                encoding="utf8" if delimiter is None else "latin-1",
            ),
            pacsv.ParseOptions(delimiter=delimiter or "\t", quote_char=False),
            pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(
            f"cannot read {path} with {len(names)} columns: {str(error).splitlines()[0]}. Point at "
            "the folder of the ml-100k files."
        ) from error
    table = table.rename_columns([name.split(":")[0] for name in names])
    for name in columns:
        if name not in table.column_names:
            raise InputError(f"{path} has no column {name!r}; its header is {names}.")
    return table.select(columns)


def log_schema(items: int, dim: int, history: int, dynamic: bool) -> FeatureSchema:
    """Return the schema of the ratings as an event log, for a model of the next item."""
    item_table = EmbeddingConfig(
        items,
        dim,
        "t_item",
        feature_names=["item", "history"],
        dynamic=DynamicConfig() if dynamic else None,
    )
    return FeatureSchema(
        label="label",
        user="user",
        time="time",
        features=(
            Feature(name="item", column="item"),
            Feature(name="history", column="item", history=history),
        ),
        sequences=(
            SequenceColumn(name="event_time", column="time"),
            SequenceColumn(name="history_time", column="time", history=history),
        ),
        tables=(item_table,),
    )


def numbers(table: pa.Table, column: str, path: Path) -> np.ndarray:
    """Return a text column as finite float64; InputError names the row of what is no number."""
    plain = pc.match_substring_regex(table[column], r"^-?\d{1,15}(\.\d*)?$").to_numpy()
    if not plain.all():
        row = int(np.flatnonzero(~plain)[0])
        raise InputError(
            f"{path}: column {column!r} holds {table[column][row].as_py()!r} in row {row}, which "
            "is no number."
        )
    return table[column].cast(pa.float64()).to_numpy()


def place_of(values: pa.ChunkedArray, keys: pa.ChunkedArray, path: Path, column: str) -> np.ndarray:
    """Return the index of each value in `keys`, which are all different.

    Raises:
        InputError: two keys are the same, or a value is not among them.
    """
    counts = pc.value_counts(keys)
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise InputError(
            f"{column} {twice[0]['values'].as_py()!r} is in the list of them twice, which {path} "
            "is joined with."
        )
    places = pc.index_in(values, value_set=keys.combine_chunks())
    if places.null_count:
        row = int(np.flatnonzero(places.is_null().to_numpy())[0])
        raise InputError(
            f"{path}: row {row} names {column} {values[row].as_py()!r}, which is not in the list "
            "of them."
        )
    return places.to_numpy().astype(np.int64)
