"""Convert MovieLens-100k to Parquet: python -m jobs.convert_movielens SOURCE OUT.

The label says whether a user rates a film 4 or 5. Users and items become ids by their place in the
file, genres, occupations, the first two characters of the zip code, age buckets and release years
by their place among the sorted values: side information that is known before any rating. The rating
itself and its time stay beside the label, for a second task and for splits; the schema does not
read them. With `dynamic` users, items and all text stay as they are, and nothing is numbered. The
title is left out. A tenth of the ratings is held out, exactly: a random one by seed, whatever else
changes, or the latest. With `sequences` the ratings are an event log, from which histories of items
are cut, and the last two films of every user are held out. Everything fits in memory: 100,000
ratings. `movielens_files` reads the files.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.convert_events import say as say_log
from jobs.converting import Converted, converted, options, say
from jobs.movielens_files import log_schema, numbers, place_of, read_films
from rayrec.checks import seed_number
from rayrec.cli.base import Command, is_said
from rayrec.cli.group import run_click
from rayrec.cli.values import PATH, count
from rayrec.command import run_command
from rayrec.data.converted import new_data_set, one_table_per_column
from rayrec.data.event_log import EventSplit, WrittenLog, write_sorted
from rayrec.data.hashing import mix_int, permutation
from rayrec.errors import ConfigError
from rayrec.layout import DynamicConfig

# small initial values: a DLRM reaches AUC 0.786 on the held-out tenth, against 0.777 from the
# tables' default bounds
_BOUND = 0.01
SPLITS, LOG_SPLITS = ("random", "time"), ("time", "leave-one-out")
_AGE_BUCKETS = (18, 25, 35, 45, 50, 56)  # the first bucket is under 18


@click.command(
    cls=Command,
    examples="""
python -m jobs.convert_movielens ml-100k data/films
python -m jobs.convert_movielens ml-100k data/films --dim 32 --split time
python -m jobs.convert_movielens ml-100k data/films --dynamic 4096
python -m jobs.convert_movielens ml-100k data/films --sequences 50
""",
)
@click.argument("source", type=PATH, metavar="SOURCE")
@click.argument("out", type=PATH, metavar="OUT")
@click.option(
    "--split",
    type=click.Choice(sorted({*SPLITS, *LOG_SPLITS})),
    help="hold out ratings at random (default), the latest by time, or with --sequences (and by "
    "default then) the last two of every user",
)
@click.option(
    "--sequences",
    type=count(),
    metavar="N",
    help="write one event log, with histories of the last N items of a user",
)
@options("ratings", "the ratings held out")
def command(**given: Any) -> None:
    """Write OUT/train and OUT/eval (Parquet), or OUT/log, and OUT/schema.json from ml-100k.

    The label says whether a rating is 4 or 5. SOURCE is a folder with u.data, u.user and u.item, as
    GroupLens publishes them, or with ml-100k.inter, ml-100k.user and ml-100k.item (tab separated,
    header of name:type).
    """
    history = given.pop("sequences")
    if history is None:
        given["split"] = given["split"] or "random"
        say(convert_movielens(**given), "ratings")
        return
    given["split"] = given["split"] or "leave-one-out"
    unused = ["seed"] if given["split"] == "time" else ["seed", "eval_fraction"]
    for name in unused:
        if is_said(name):
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} has no effect with --sequences and --split {given['split']}; leave it "
                "out."
            )
    if given["split"] != "time":
        given["eval_fraction"] = None
    del given["seed"]
    say_log(convert_movielens_log(history=history, **given))


main = partial(run_click, command, "python -m jobs.convert_movielens")


def convert_movielens(
    source: str | Path,
    out: str | Path,
    *,
    dim: int = 16,
    seed: int = 0,
    eval_fraction: float = 0.1,
    split: str = "random",
    dynamic: int | None = None,
    overwrite: bool = False,
) -> Converted:
    """Convert a folder with MovieLens-100k.

    Args:
        source: the folder, with u.data, u.user and u.item, or with ml-100k.inter, ml-100k.user and
            ml-100k.item.
        out: gets train/, eval/ and schema.json.
        seed: which ratings are held out, and the order of rows.
        split: "random", or "time": the latest ratings are held out.
        dynamic: rows of each of the tables, which are dynamic; None numbers the ids.
        overwrite: replace what an earlier conversion left in `out`.
    Raises:
        InputError: a file or column is missing, or a rating names an unknown user or item.
        ConfigError: the fraction leaves nothing to train on or to evaluate, `split` is neither
            word, or `out` holds data already.
    """
    seed_number("seed", seed)
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} is unknown; use {' or '.join(SPLITS)}.")
    table, sizes, ratings = _join_columns(Path(source), dynamic is not None)
    rows, times = table.num_rows, table["time"].to_numpy()
    held_out = _held_out(rows, eval_fraction, ratings)
    order = permutation(mix_int(seed), rows)
    # the last ones in this order; the seed decides between equal times
    kept = order[::-1] if split == "random" else order[np.argsort(times[order], kind="stable")]
    is_eval = np.zeros(rows, bool)
    is_eval[kept[rows - held_out :]] = True
    parts = {"eval": order[is_eval[order]], "train": order[~is_eval[order]]}
    rule = None if dynamic is None else DynamicConfig()
    sizes = sizes if dynamic is None else dict.fromkeys(sizes, dynamic)
    schema = one_table_per_column(sizes, dim, means=("genres",), bound=_BOUND, dynamic=rule)
    with new_data_set(out, overwrite) as folder:
        for name, places in parts.items():
            (folder / name).mkdir()
            path = folder / name / "part-00000.parquet"
            pq.write_table(table.take(pa.array(places)), path, row_group_size=16_384)
        schema.save(folder / "schema.json")
    return converted(out, rows - held_out, held_out)


def convert_movielens_log(
    source: str | Path,
    out: str | Path,
    *,
    history: int,
    dim: int = 16,
    split: str = "leave-one-out",
    eval_fraction: float | None = None,
    dynamic: int | None = None,
    overwrite: bool = False,
) -> WrittenLog:
    """Convert a folder with MovieLens-100k to an event log with histories of items.

    Args:
        source, dim, dynamic, overwrite: as in `convert_movielens`.
        out: gets log/ and schema.json.
        history: most items of a history, and the length of windows (`EventSplit`).
        split: "leave-one-out": the last two ratings of every user are held out; or "time".
        eval_fraction: of a split by time, the share of the test and that of the validation.
    Raises:
        InputError, ConfigError: as `convert_movielens`.
    """
    rule = EventSplit(windows=history)
    if split not in LOG_SPLITS or (split == "time") != (eval_fraction is not None):
        raise ConfigError(
            f"split={split!r} with eval_fraction={eval_fraction}; use leave-one-out without a "
            "fraction, or time with one."
        )
    table, sizes, ratings = _join_columns(Path(source), dynamic is not None)
    if eval_fraction is not None:
        rows, times = table.num_rows, np.sort(table["time"].to_numpy())
        held_out = _held_out(rows, eval_fraction, ratings)
        begin = max(0, rows - 2 * held_out)
        test, validation = times[rows - held_out].item(), times[begin].item()
        rule = replace(rule, validation_from=validation, test_from=test)
    schema = log_schema(dynamic or sizes["item"], dim, history, dynamic is not None)
    with new_data_set(out, overwrite) as folder:
        users, events = write_sorted([table], folder / "log", "user", "time", rule)
        schema.save(folder / "schema.json")
    return WrittenLog(Path(out) / "log", users, events)


def _held_out(rows: int, eval_fraction: float, ratings: Path) -> int:
    """Return how many ratings are held out."""
    if not 0 < eval_fraction < 1:
        raise ConfigError(f"eval_fraction={eval_fraction}; it must lie between 0 and 1.")
    held_out = round(rows * eval_fraction)
    if not 0 < held_out < rows:
        raise ConfigError(
            f"eval_fraction={eval_fraction} of {rows} ratings in {ratings} holds out {held_out}; "
            "choose another."
        )
    return held_out


def _join_columns(root: Path, as_they_are: bool) -> tuple[pa.Table, dict[str, int], Path]:
    """Join ratings, users and items.

    Args:
        as_they_are: text stays text.
    Returns:
        one row per rating with its label, the rating itself and its time, and user, item and their
        side information, all as ids; the number of different ids, by column; and the path of the
        ratings' file.
    """
    *paths, ratings, users, items = read_films(root)
    user = place_of(ratings["user_id"], users["user_id"], paths[0], "user_id")
    item = place_of(ratings["item_id"], items["item_id"], paths[0], "item_id")
    ages = np.searchsorted(_AGE_BUCKETS, numbers(users, "age", paths[1]), side="right")
    stars = numbers(ratings, "rating", paths[0])
    words = pc.split_pattern(items["class"].fill_null(""), " ").combine_chunks()
    genres, num_genres = _as_ids(words.flatten(), as_they_are)
    columns = {
        "label": pa.array((stars >= 4.0).astype(np.int8)),
        "user": ratings["user_id"] if as_they_are else pa.array(user),
        "item": ratings["item_id"] if as_they_are else pa.array(item),
        "genres": pa.ListArray.from_arrays(words.offsets, genres).take(pa.array(item)),
        "age": pa.array(ages[user]),
    }
    sizes = {"user": len(users), "item": len(items), "genres": num_genres}
    sizes["age"] = len(_AGE_BUCKETS) + 1
    zips = pc.utf8_slice_codeunits(users["zip_code"], 0, 2)
    of_users = {"gender": users["gender"], "occupation": users["occupation"], "zip": zips}
    for name, column in of_users.items():
        ids, sizes[name] = _as_ids(column, as_they_are)
        columns[name] = ids.take(pa.array(user))
    years, sizes["year"] = _as_ids(items["release_year"], as_they_are)
    columns["year"] = years.take(pa.array(item))
    columns["rating"] = pa.array(stars.astype(np.float32))
    columns["time"] = pa.array(numbers(ratings, "timestamp", paths[0]).astype(np.int64))
    return pa.table(columns), sizes, paths[0]


def _as_ids(column: pa.Array | pa.ChunkedArray, as_they_are: bool) -> tuple[pa.Array, int]:
    """Text as ids, and the number of different ones.

    They are places in the sorted distinct values, or the text as it is.
    """
    filled = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    filled = filled.fill_null("")
    words, ids = np.unique(filled.to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
    return filled if as_they_are else pa.array(ids.astype(np.int64)), len(words)


if __name__ == "__main__":
    sys.exit(run_command(main))
