"""MovieLens-100k as GroupLens publishes it, read into the columns that `movielens` converts.

u.data is tab separated, the others are separated by '|'; none has a header, and u.item is Latin-1.
An item has a release date such as 01-Jan-1995, of which the year is kept, and one 0 or 1 per genre.
Format: the README that lies beside the files.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from rayrec.errors import InputError

_NAMES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy "
    "Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western"
)
GENRES = tuple(_NAMES.split())
RATINGS = ("user_id", "item_id", "rating", "timestamp")
USERS = ("user_id", "age", "gender", "occupation", "zip_code")
ITEMS = ("item_id", "title", "release_date", "video_release_date", "url", *GENRES)


def read_ratings(path: Path) -> pa.Table:
    """Text columns user_id, item_id, rating and timestamp of u.data.

    Raises:
        InputError: the file cannot be read or has another layout.
    """
    return _read(path, RATINGS, "\t")


def read_users(path: Path) -> pa.Table:
    """Text columns user_id, age, gender, occupation and zip_code of u.user.

    Raises:
        InputError: the file cannot be read or has another layout.
    """
    return _read(path, USERS, "|")


def read_items(path: Path) -> pa.Table:
    """Text columns item_id, release_year and class (names of genres, with spaces) of u.item.

    Raises:
        InputError: the file cannot be read or has another layout.
    """
    table = _read(path, ITEMS, "|")
    years = pc.utf8_slice_codeunits(table["release_date"], -4)
    words: list[list[str]] = [[] for _ in range(table.num_rows)]
    for genre in GENRES:
        for row, flag in enumerate(table[genre].to_pylist()):
            if flag not in ("0", "1"):
                raise InputError(
                    f"{path}: row {row} holds {flag!r} for genre {genre}; it must be 0 or 1."
                )
            if flag == "1":
                words[row].append(genre)
    classes = pa.array([" ".join(genres) for genres in words], pa.string())
    return pa.table({"item_id": table["item_id"], "release_year": years, "class": classes})


def _read(path: Path, names: tuple[str, ...], delimiter: str) -> pa.Table:
    types = dict.fromkeys(names, pa.string())
    try:
        return pacsv.read_csv(
            path,
            read_options=pacsv.ReadOptions(column_names=list(names), encoding="latin-1"),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=pacsv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"cannot read {path} as GroupLens' {path.name} with {len(names)} columns: "
            f"{str(error).splitlines()[0]}. Point at the folder of the ml-100k files."
        ) from error
