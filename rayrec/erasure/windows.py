"""`StoredWindows`: the windows of a stream that a run keeps, whose rows hold keys as they came.

A row stays where it is, since the place of a run is a window and a batch, and what holds a key of
it becomes null: an empty bag. So do lists that are aligned with it, and the weights of its ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from rayrec.data import FeatureSchema
from rayrec.data.column_types import forgotten, is_list, is_text
from rayrec.erasure.keys import KeyFile
from rayrec.erasure.staging import linked
from rayrec.errors import InputError
from rayrec.storage import one_line
from rayrec.streams.kept import ARROW, PARQUET, REFUSED, check_window, write_window


class StoredWindows:
    """Windows in the folder `stream` of a run.

    Args:
        folder: local folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear_unfinished(self) -> None:
        """Delete files of rows that no record names, which a killed run has left."""
        for path in self._files():
            record = _record_of(path)
            try:
                named = json.loads(record.read_bytes()).get("file", path.name)
            except FileNotFoundError:
                named = None
            except (ValueError, AttributeError):
                continue  # the run says that its record is damaged
            if named != path.name:
                path.unlink()

    def has_notes(self) -> bool:
        """Return True if there are notes of refused rows, also unfinished ones, whose reasons may
        tell values.
        """
        return any((self._folder / REFUSED).glob("*"))

    def find(self, keys: KeyFile, schemas: Sequence[FeatureSchema]) -> dict[str, int]:
        """Return the number of rows with a key by file, of files that have any.

        Raises:
            InputError: a file cannot be read.
        """
        found = {}
        for path in self._files():
            masks = _masks(self._read(path.name)[0], keys, schemas)
            rows = pc.sum(_any(list(masks.values()))).as_py() if masks else 0
            if rows:
                found[path.name] = int(rows)
        return found

    def rewrite(
        self, out: Path, keys: KeyFile, schemas: Sequence[FeatureSchema], found: dict[str, int]
    ) -> None:
        """Write the folder anew, without keys and without the notes of refused rows.

        Raises:
            OSError: the file system refuses. InputError: a file cannot be read.
        """
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and path.name not in found:
                linked(self._folder, out, path.name)
        for name in found:
            # the order of the rows of an epoch depends on the groups
            rows, group = self._read(name)
            for column, mask in _masks(rows, keys, schemas).items():
                place = rows.schema.get_field_index(column)
                kept = _emptied(rows[column], mask)
                rows = rows.set_column(place, forgotten(rows.schema.field(column)), kept)
            crc32, record = write_window(rows, str(out / name), group), _record_of(out / name)
            if _crc32_in(record) is not None:
                told = json.loads(record.read_bytes()) | {"crc32": crc32}
                record.unlink()  # it is a link to the old one
                record.write_text(json.dumps(told))

    def _files(self) -> list[Path]:
        """Return the files of rows, in order."""
        return sorted(p for p in self._folder.glob("window-*") if p.suffix in (ARROW, PARQUET))

    def _read(self, name: str) -> tuple[pa.Table, int]:
        """Return the rows of a file, and how many its first group has.

        Raises:
            InputError: it cannot be read.
        """
        path = self._folder / name
        try:
            crc32 = _crc32_in(_record_of(path))
            if path.suffix == ARROW or crc32 is not None:
                check_window(str(path), crc32)
            if path.suffix == PARQUET:
                rows = pq.read_table(path, page_checksum_verification=True)
                return rows, pq.read_metadata(path).row_group(0).num_rows
            with ipc.open_file(path) as file:
                return file.read_all(), file.get_batch(0).num_rows
        except (OSError, ValueError, AttributeError, pa.ArrowException, InputError) as error:
            raise InputError(
                f"the window {path} cannot be read: {one_line(error).rstrip('.')}. Delete it, and "
                "the checkpoints that go on from it."
            ) from error


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name[: len('window-00000000')]}.json")


def _crc32_in(record: Path) -> int | None:
    """Return the checksum that a record has; None where it has none, or is not there."""
    try:
        crc32: int | None = json.loads(record.read_bytes()).get("crc32")
    except FileNotFoundError:
        return None
    return crc32


def _masks(
    rows: pa.Table, keys: KeyFile, schemas: Sequence[FeatureSchema]
) -> dict[str, pa.BooleanArray]:
    """Return the rows whose entry has to go, by column."""
    found: dict[str, pa.BooleanArray] = {}
    for schema in schemas:
        for feature, values in keys.of_features(schema):
            if feature.column in rows.schema.names:
                # part by part: Arrow joins no more than 2 GiB of text
                parts = [_holds(part, values) for part in rows[feature.column].chunks]
                mask = pa.chunked_array(parts, pa.bool_()).combine_chunks()
                for column in _together(schema, feature.name):
                    if column in rows.schema.names:
                        both = [mask, *([found[column]] if column in found else [])]
                        found[column] = _any(both)
    return {column: mask for column, mask in found.items() if pc.any(mask).as_py()}


def _emptied(column: pa.ChunkedArray, mask: pa.BooleanArray) -> pa.ChunkedArray:
    """Return a column with null where the mask is True, and with nothing left below the nulls."""
    kept, first, kind = [], 0, column.type
    zeros = None
    if pa.types.is_primitive(kind) or (is_text(kind) and kind.num_buffers == 3):
        # their values stay below nulls, and those of other types are made anew
        buffers = [None, pa.py_buffer(bytes(16)), pa.py_buffer(b"")][: kind.num_buffers]
        zeros = pa.Array.from_buffers(kind, 1, buffers)[0]
    for part in column.chunks:
        own = mask.slice(first, len(part))
        first += len(part)
        part = part if zeros is None else pc.if_else(own, zeros, part)
        kept.append(pc.if_else(own, pa.scalar(None, kind), part))
    return pa.chunked_array(kept, kind)


def _any(masks: list[pa.BooleanArray]) -> pa.BooleanArray:
    out = masks[0]
    for mask in masks[1:]:
        out = pc.or_(out, mask)
    return out


def _holds(column: pa.Array, values: pa.Array) -> pa.BooleanArray:
    """Return True for each row that is a key, or a list with one."""
    entries = _plain(pc.list_flatten(column) if is_list(column.type) else column)
    keys = _plain(values)
    if entries is None or keys is None or entries.type != keys.type:
        # a number and the text of its digits are two ids
        return pa.array(np.zeros(len(column), bool))
    own = pc.is_in(entries, keys)
    if not is_list(column.type):
        return own
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    held = np.zeros(len(column), bool)
    held[np.repeat(np.arange(len(column)), lengths)[np.asarray(own)]] = True
    return pa.array(held)


def _plain(values: pa.Array) -> pa.Array | None:
    """Return ids as training tells them apart: numbers by their 64 bits, and text by its bytes;
    None of what are no ids.
    """
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    if is_text(values.type):
        return values.cast(pa.large_binary())
    if pa.types.is_uint64(values.type):
        return values.view(pa.int64())
    return values.cast(pa.int64()) if pa.types.is_integer(values.type) else None


def _together(schema: FeatureSchema, name: str) -> set[str]:
    """Return the columns of a feature, its weights, and what is aligned with it."""
    lists = [*schema.features, *schema.sequences]
    group, columns, size = {name}, set[str](), 0
    while len(group) > size:
        size = len(group)
        group |= {one.name for one in lists if one.aligned_with in group}
        group |= {one.aligned_with for one in lists if one.name in group and one.aligned_with}
        columns |= {one.column for one in lists if one.name in group}
        columns |= {f.weights for f in schema.features if f.name in group and f.weights is not None}
        # other features may read these columns, too, beside weights and lists of their own
        group |= {one.name for one in lists if one.column in columns}
        group |= {f.name for f in schema.features if f.weights in columns}
    return columns
