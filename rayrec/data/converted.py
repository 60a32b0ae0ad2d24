"""The folder that a conversion writes: its parts appear together when all is written.

A conversion writes into a hidden folder beside its result and moves the parts into place at the
end. A conversion that fails leaves what was there before, and no folder of its own. Files of an
earlier conversion would be read together with the new ones, so they are an error, or are replaced
where the user says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.checks import absolute_path, is_uri
from rayrec.errors import ConfigError, SaveError
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn, Feature
from rayrec.layout.tables import EmbeddingBagConfig, PoolingType
from rayrec.machine.folder_lock import folder_lock
from rayrec.storage import one_line, remove_empty

PARTS = ("train", "eval", "schema.json", "next_item.json", "truth.json", "log")
GROUP_ROWS = 65_536  # of a row group
_OLD = "old-"  # begins the name of a part that a new one takes the place of


@contextmanager
def new_data_set(out: str | Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write to; what is in it at the end of the block is moved to `out`.

    Args:
        out: the local folder of the result; made if need be. Other files in it stay as they are.
        overwrite: replace what an earlier conversion wrote, and write beside other files.
    Raises:
        ConfigError: `out` holds something and `overwrite` is not set, or it cannot be written to.
        SaveError: the storage refuses later on.
    """
    target = Path(absolute_path("the folder of the data", out))
    if is_uri(os.fspath(out)):
        raise ConfigError(
            f"{out} is no local folder, in which data are made; name one, and copy it afterwards."
        )
    _check_target(target, overwrite)
    made = [folder for folder in (target, *target.parents) if not os.path.lexists(folder)]
    try:
        target.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target, prefix=".converting-"))
    except OSError as error:
        remove_empty(made)
        raise ConfigError(
            f"cannot write to {target}: {error.strerror}. Name a folder that can be written to."
        ) from None
    moved = False
    try:
        yield partial
        _move_in(partial, target, overwrite)
        moved = True
    except OSError as error:
        # an old part that could not be put back
        kept = next(partial.glob(f"{_OLD}*"), None)
        raise SaveError(
            f"cannot write the data to {target}: {one_line(error)}. Make room, or name a folder "
            f"elsewhere.{f' The old data, or a part of them, are in {partial}.' if kept else ''}"
        ) from error
    finally:
        # the only copy of an old part may be here
        if moved or not any(partial.glob(f"{_OLD}*")):
            shutil.rmtree(partial, ignore_errors=True)
        remove_empty(made)


def _check_target(target: Path, overwrite: bool) -> bool:
    """Check that data may be written to a folder, and return True if it holds some already."""
    there = [name for name in PARTS if _holds_data(target / name)]
    others = sorted(target.glob("[!.]*")) if os.path.isdir(target) else []
    if others and not there and not overwrite:
        raise ConfigError(
            f"{target} holds {others[0].name!r}, which is no part of a data set. Name a new "
            "folder, or say overwrite=True (--overwrite) to write beside it."
        )
    if there and not overwrite:
        raise ConfigError(
            f"{target} already holds {' and '.join(there)}, which would be read together with the "
            "new data. Name a new folder, or say overwrite=True (--overwrite) to replace them."
        )
    return bool(there)


def _move_in(partial: Path, target: Path, overwrite: bool) -> None:
    """Move the parts into their places, and the old ones out of them; or leave all as it was.

    Raises:
        ConfigError: others have written there since the first look, or do so at this moment.
        OSError: the file system refuses a move; those before it are undone, as they are where the
            user ends the process. Or the folder of the new parts is gone.
    """
    partial.stat()
    with folder_lock(target) as is_alone:
        if not is_alone:
            raise ConfigError(
                f"another process puts its data into {target} at this moment. Name a new folder."
            )
        replaces = _check_target(target, overwrite)
        done: list[tuple[Path, Path]] = []
        try:
            for name in PARTS:
                old, new = target / name, partial / name
                # an old part without a new one goes, too
                if not new.exists() and not (replaces and old.exists()):
                    continue
                for source, place in ((old, partial / f"{_OLD}{name}"), (new, old)):
                    if os.path.lexists(source):
                        # nothing is at the place before
                        done.append((source, place))
                        source.rename(place)
        except BaseException:
            for source, place in reversed(done):
                with suppress(OSError):
                    place.rename(source)
            raise


def _holds_data(path: Path) -> bool:
    return os.path.isfile(path) or (os.path.isdir(path) and any(path.iterdir()))


class PartsWriter:
    """Writes part-00000.parquet and so on, in row groups of `GROUP_ROWS`, whatever comes in.

    No rows give no file.
    """

    def __init__(self, folder: Path, groups_per_file: int) -> None:
        # not the folders above it: where they are gone, so is what was written before
        folder.mkdir(exist_ok=True)
        self.rows = 0
        self._folder, self._groups_per_file = folder, groups_per_file
        self._waiting: list[pa.Table] = []
        self._groups = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Take rows; they are written as soon as they fill a row group."""
        self.rows += len(table)
        # tables wait uncopied until a row group is full
        self._waiting.append(table)
        while sum(map(len, self._waiting)) >= GROUP_ROWS:
            whole = pa.concat_tables(self._waiting)
            self._write(whole.slice(0, GROUP_ROWS))
            self._waiting = [whole.slice(GROUP_ROWS)]

    def add_group(self, table: pa.Table) -> None:
        """Write rows as one row group, of any size."""
        self.rows += len(table)
        self._write(table)

    def close(self) -> None:
        """Write what is left, as a shorter row group."""
        rest = pa.concat_tables(self._waiting) if self._waiting else None
        if rest is not None and len(rest):
            self._write(rest)
        self._waiting = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, table: pa.Table) -> None:
        number, place = divmod(self._groups, self._groups_per_file)
        if place == 0:
            if self._file is not None:
                self._file.close()
            path = self._folder / f"part-{number:05}.parquet"
            self._file = pq.ParquetWriter(path, table.schema)
        assert self._file is not None
        self._file.write_table(table, row_group_size=len(table))
        self._groups += 1


def one_table_per_column(
    sizes: Mapping[str, int],
    dim: int,
    *,
    label: str | tuple[str, ...] = "label",
    dense: Sequence[str] = (),
    hashed: Container[str] = (),
    means: Container[str] = (),
    bound: float | None = None,
    dynamic: DynamicConfig | None = None,
) -> FeatureSchema:
    """A schema in which every column is a feature with a table `t_<column>` of its own.

    Args:
        hashed: columns whose values are hashed into the rows of their tables.
        means: columns of lists that are pooled by their mean; others are summed.
        bound: initial values lie in [-bound, bound]; the tables' default when None.
        dynamic: the rules of all tables by which ids get rows; None numbers the rows.
    """
    features, tables = [], []
    for name, size in sizes.items():
        buckets = size if name in hashed else None
        features.append(Feature(name=name, column=name, hash_buckets=buckets))
        pooling = PoolingType.MEAN if name in means else PoolingType.SUM
        table = EmbeddingBagConfig(size, dim, f"t_{name}", feature_names=[name], pooling=pooling)
        table = replace(table, dynamic=dynamic)
        if bound is not None:
            table = replace(table, weight_init_min=-bound, weight_init_max=bound)
        tables.append(table)
    return FeatureSchema(
        label=label,
        dense=tuple(DenseColumn(column=name) for name in dense),
        features=tuple(features),
        tables=tuple(tables),
    )
