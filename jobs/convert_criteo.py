"""Convert Criteo text files to Parquet: python -m jobs.convert_criteo SOURCE... OUT.

The rows are streamed block by block, label, I1-13 and C1-26 as text, beside the schema they fit.
Reads tab-separated files without a header (the Kaggle and Terabyte layout) and comma-separated ones
with a header, where an Id column may come first. Counts become log(1 + x), negatives and missing 0.
The 8 hex digits of a category become a 32-bit number, hashed into buckets
(`hashing.hash_integers`), or with `dynamic` an id as it is; text that is not hex is refused; a
missing category is an empty bag. A row goes to eval/ when the hash of (seed, its number) falls
below the fraction: the split does not depend on the order or size of blocks. Cost: about 1 s per
million values on one core, most of it in pyarrow's CSV reader; memory is a few blocks.
"""

from __future__ import annotations

import csv
import sys
from binascii import unhexlify
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from jobs.converting import Converted, converted, options, say
from rayrec.checks import seed_number, whole_number
from rayrec.cli.base import Command
from rayrec.cli.group import run_click
from rayrec.cli.values import PATH, count
from rayrec.command import run_command
from rayrec.data.converted import PartsWriter, new_data_set, one_table_per_column
from rayrec.data.hashing import hash_integers, mix_int, random_bits
from rayrec.errors import ConfigError, InputError
from rayrec.layout import DynamicConfig

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NUM_BUCKETS = 100_000  # where nothing else is said
MAX_BUCKETS = 2**31 - 1  # ids are written as int32
_COLUMNS = ("label", *DENSE, *CATEGORIES)
_HEX = "^[0-9a-fA-F]{1,15}$"  # 15 digits are 60 bits, so no value becomes negative


@click.command(
    cls=Command,
    examples="""
python -m jobs.convert_criteo train.txt data/criteo
python -m jobs.convert_criteo day_0.gz day_1.gz data/criteo --num-buckets 1000000 --dim 32
python -m jobs.convert_criteo day_0.gz day_1.gz data/criteo --dynamic 1048576
""",
)
@click.argument("sources", type=PATH, nargs=-1, required=True, metavar="SOURCE...")
@click.argument("out", type=PATH, metavar="OUT")
@click.option(
    "--num-buckets",
    type=count(1, MAX_BUCKETS),
    help=f"ids per categorical column, by hash; {NUM_BUCKETS} unless given",
)
@options("rows", "rows held out, drawn per row")
def command(**given: Any) -> None:
    """Write OUT/train, OUT/eval (Parquet) and OUT/schema.json from Criteo click logs.

    A log has label, I1-I13 and C1-C26, tab separated without a header or comma separated with one,
    plain or compressed, an Id column first if there is one. Several are read in this order.
    """
    say(convert_criteo(**given), "rows")


main = partial(run_click, command, "python -m jobs.convert_criteo")


def convert_criteo(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    num_buckets: int | None = None,
    dim: int = 16,
    eval_fraction: float = 0.1,
    seed: int = 0,
    dynamic: int | None = None,
    overwrite: bool = False,
) -> Converted:
    """Convert Criteo text files, in the order given.

    Args:
        sources: files, plain or compressed (.gz, .bz2, .zst).
        out: gets train/, eval/ and schema.json.
        num_buckets: rows of each of the 26 tables; None takes 100,000.
        dynamic: rows of each of the tables, which are dynamic; None hashes into buckets.
        eval_fraction: expected share of rows that go to eval/, by seed and row number.
        overwrite: replace what an earlier conversion left in `out`.
    Raises:
        InputError: a file is missing, is not in Criteo's layout, or holds a value that is no number
            or no hex; names file and value. Or every row is held out.
        ConfigError: a number out of range, buckets for dynamic tables, or `out` holds data already.
    """
    seed_number("seed", seed)
    if dynamic is not None and num_buckets is not None:
        raise ConfigError(
            f"num_buckets={num_buckets} and dynamic={dynamic}: dynamic tables take ids as they "
            "are. Leave one of the two out."
        )
    buckets = NUM_BUCKETS if num_buckets is None else num_buckets
    whole_number("num_buckets", buckets, 1, MAX_BUCKETS)
    if not 0 <= eval_fraction < 1:
        raise ConfigError(f"eval_fraction={eval_fraction}; it must be in [0, 1).")
    rows, rule = (buckets, None) if dynamic is None else (dynamic, DynamicConfig())
    sizes = dict.fromkeys(CATEGORIES, rows)
    schema = one_table_per_column(sizes, dim, dense=DENSE, dynamic=rule)
    hashed = buckets if dynamic is None else None
    with new_data_set(out, overwrite) as folder:
        rows_train, rows_eval = _split(sources, folder, hashed, eval_fraction, seed)
        schema.save(folder / "schema.json")
    return converted(out, rows_train, rows_eval)


def _split(
    sources: Sequence[str | Path],
    folder: Path,
    buckets: int | None,
    eval_fraction: float,
    seed: int,
) -> tuple[int, int]:
    """Write train/ and eval/ below `folder`; the rows of each."""
    train, evaluation = PartsWriter(folder / "train", 16), PartsWriter(folder / "eval", 16)
    # A row is held out when its 64 random bits lie below it.
    threshold = np.uint64(int(eval_fraction * 2**64))
    row = 0
    try:
        for source in sources:
            for block in _blocks(Path(source)):
                table = _convert(block, buckets, Path(source))
                # by the row's number, so that blocks may have any size
                held_out = random_bits(mix_int(seed), row, row + len(table)) < threshold
                row += len(table)
                evaluation.add(table.filter(pa.array(held_out)))
                train.add(table.filter(pa.array(~held_out)))
    finally:
        train.close()
        evaluation.close()
    if row == 0:
        raise InputError(f"no rows in {[str(s) for s in sources]}; give files in Criteo's layout.")
    if train.rows == 0:
        raise InputError(
            f"all {row} rows were held out by eval_fraction={eval_fraction}, so there is no row "
            "to train on. Lower it."
        )
    return train.rows, evaluation.rows


def _blocks(path: Path) -> Iterator[pa.Table]:
    """The file's columns by Criteo's names, in blocks; categories as text."""
    try:
        with pa.input_stream(str(path), compression="detect") as file:
            first = file.read(65_536).decode("utf-8", errors="replace").split("\n")[0].rstrip("\r")
        names, delimiter, skip = _layout(first, path)
        types = {n: pa.string() if n in CATEGORIES or n == "Id" else pa.float64() for n in names}
        layout = {"column_names": names, "skip_rows": skip, "block_size": 8 << 20}
        missing = {"strings_can_be_null": True, "null_values": [""]}
        reader = pacsv.open_csv(
            path,
            pacsv.ReadOptions(use_threads=False, **layout),
            pacsv.ParseOptions(delimiter=delimiter),
            pacsv.ConvertOptions(column_types=types, include_columns=list(_COLUMNS), **missing),
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise InputError(
            f"cannot read {path} as Criteo's text: {str(error).splitlines()[0]}. Check the file "
            "and its delimiter."
        ) from error


def _layout(first: str, path: Path) -> tuple[list[str], str, int]:
    """Column names, delimiter and lines to skip, from the first line."""
    delimiter = "\t" if "\t" in first else ","
    fields = next(csv.reader([first], delimiter=delimiter), [])
    if len(fields) not in (40, 41):
        raise InputError(
            f"{path} has {len(fields)} columns; Criteo's layout is label, I1-I13, C1-C26, with an "
            "optional Id before them."
        )
    names = [*(["Id"] if len(fields) == 41 else []), *_COLUMNS]
    header = [f.strip().lower() for f in fields] == [n.lower() for n in names]
    if not header and "label" in (f.strip().lower() for f in fields):
        raise InputError(f"the header of {path} is {fields}; it must be {names}.")
    return names, delimiter, int(header)


def _convert(block: pa.Table, buckets: int | None, path: Path) -> pa.Table:
    label = block["label"].combine_chunks()
    values = label.to_numpy(zero_copy_only=False)
    if label.null_count or not np.isin(values, (0.0, 1.0)).all():
        row = int(np.flatnonzero(~np.isin(values, (0.0, 1.0)))[0])
        raise InputError(
            f"{path} holds the label {label[row].as_py()}; labels are 0 or 1. Check the column "
            "layout."
        )
    columns: dict[str, pa.Array] = {"label": pa.array(values.astype(np.int8))}
    for name in DENSE:
        counts = block[name].combine_chunks().fill_null(0.0).to_numpy(zero_copy_only=False)
        if not np.isfinite(counts).all():
            value = counts[~np.isfinite(counts)][0]
            raise InputError(
                f"column {name} of {path} holds {value}, which is no count. Leave the field empty "
                "where it is unknown."
            )
        # Counts have a long tail; the logarithm brings them to the size of the other inputs.
        columns[name] = pa.array(np.log1p(np.maximum(counts, 0.0)).astype(np.float32))
    for name in CATEGORIES:
        text = block[name].combine_chunks()
        ids = np.zeros(len(text), np.int64)
        known = text.is_valid().to_numpy(zero_copy_only=False)
        numbers = parse_hex(text.drop_null(), f"column {name} of {path}")
        # Ids below a null are never read: the mask makes an empty bag of the row.
        ids[known] = numbers if buckets is None else hash_integers(numbers, buckets)
        kind = np.int64 if buckets is None else np.int32
        columns[name] = pa.array(ids.astype(kind), mask=~known)
    return pa.table(columns)


def parse_hex(text: pa.StringArray, where: str) -> NDArray[np.int64]:
    """Strings of 1 to 15 hex digits, no nulls, to their values.

    Raises:
        InputError: names the first string that is not hex, and `where`.
    """
    lengths = pc.binary_length(text).to_numpy()
    if ((lengths > 0) & (lengths < 16)).all():
        # 16 digits are the 8 bytes of a number, and one call reads those of all strings
        padded = pc.ascii_lpad(text, 16, "0").buffers()[2]
        with suppress(ValueError):
            whole = unhexlify(memoryview(padded)[: 16 * len(text)])
            return np.frombuffer(whole, ">i8").astype(np.int64)
    word = text[int(np.argmin(pc.match_substring_regex(text, _HEX)))].as_py()
    raise InputError(f"{where} holds {word!r}, which is not a hex category of 1 to 15 digits.")


if __name__ == "__main__":
    sys.exit(run_command(main))
