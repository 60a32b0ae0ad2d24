"""The rows of ids in artifacts: found, and taken out of a copy.

A row of a dynamic table is a row of zeros then that belongs to no id, as in every artifact. An
artifact does not know how other rows began, so they become zeros, too. Files without such a row are
linked, and not copied; a table passes through bounded memory, but for the ids of its rows.

    # R rows of a table, U changed ones
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.data import FeatureSchema
from rayrec.dynamic.columns import NO_KEY
from rayrec.erasure.keys import StoredIds, TableSize
from rayrec.erasure.staging import Found, linked
from rayrec.errors import ConfigError
from rayrec.quant import PackedTable, pack_rows
from rayrec.quant.tables import chunks
from rayrec.serve.artifact import DENSE, PROGRAM
from rayrec.serve.chain.row_files import ChangedRows
from rayrec.serve.dense_file import loaded_dense
from rayrec.serve.manifest import MANIFEST, Manifest, StoredTable
from rayrec.serve.program import program_with
from rayrec.serve.signing import SUFFIX, SigningKey
from rayrec.serve.stored import read_keys, read_stored, read_table, stored
from rayrec.serve.table_file import TABLES, ids_path, write_ids, write_table

NONE = torch.empty(0, dtype=torch.int64)


class StoredArtifact:
    """An artifact in a local folder.

    Attributes:
        folder: the folder.
        manifest: its manifest.
    Raises:
        ArtifactError: the manifest cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, Manifest.read_file(folder)

    def schema(self) -> FeatureSchema | None:
        """Return its schema; None where it was exported without."""
        file = self.manifest.schema
        if file is None:
            return None
        text = read_stored(self.folder, file).decode(errors="replace")
        return FeatureSchema.from_json(text, str(self.folder / file.path))

    def tables(self) -> list[TableSize]:
        """Return its tables."""
        return [TableSize(t.name, t.rows, t.ids is not None) for t in self.manifest.tables]

    def find(self, wanted: Mapping[str, StoredIds]) -> Found:
        """Read the files of the tables of ids, and return what they hold of them.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        found = Found()
        for table in self.manifest.tables:
            if table.name in wanted:
                # the bytes are compared with the manifest's sha256, and then looked at
                read_table(self.folder, table, lambda piece, place: None)
                keys, ids = self._keys(table), wanted[table.name].ids
                held = held_in(table.packed, None, self._rows(table), keys, ids)
                found.add(table.file.path, table.name, table.rows, held)
                if table.ids is not None:
                    found.add(table.ids.path, table.name, 0, held)
        return found

    def rewrite(
        self,
        out: Path,
        wanted: Mapping[str, StoredIds],
        changes: Sequence[ChangedRows] = (),
        latest: tuple[int, bytes] | None = None,
        key: SigningKey | None = None,
    ) -> Manifest:
        """Write the artifact without the rows of ids.

        Args:
            out: new folder.
            changes: rows that were published since, the oldest first.
            latest: step and dense part that were published last; None keeps those of the artifact.
            key: key to sign the manifest with; None signs none.
        Raises:
            ArtifactError: a file is missing or damaged.
            OSError: the file system refuses.
        """
        (out / TABLES).mkdir(parents=True)
        tables = []
        for number, table in enumerate(self.manifest.tables):
            own = [change for change in changes if change.number == number]
            ids = wanted[table.name].ids if table.name in wanted else NONE
            tables.append(self._rewrite_table(out, table, own, ids))
        others = {one.path for one in self.manifest.other_files()}
        manifest = replace(self.manifest, tables=tuple(tables))
        if latest is not None:
            step, dense = latest
            others -= {self.manifest.dense.path}
            manifest = replace(manifest, step=step, dense=stored(out, DENSE, dense), compiled=None)
            if manifest.program is not None and manifest.recipe is None:
                # it has dense parameters of its own, and nothing else to build the model from
                others -= {PROGRAM}
                program = read_stored(self.folder, manifest.program)
                now = loaded_dense(dense, str(self.folder))
                content = program_with(program, now, self.folder / PROGRAM)
                manifest = replace(manifest, program=stored(out, PROGRAM, content))
            if self.manifest.compiled is not None:
                others -= {self.manifest.compiled.file.path}
        for path in others:
            linked(self.folder, out, path)
        manifest = manifest.sealed()
        text = manifest.to_bytes()
        if key is not None:
            key.sign(out / MANIFEST, text)
        (out / MANIFEST).write_bytes(text)
        return manifest

    def key_of(self, key: SigningKey | None) -> SigningKey | None:
        """Return the key to sign a copy with; None where this one is not signed.

        Raises:
            ConfigError: it is signed, and there is no key.
            ArtifactError: it is not signed with the key.
        """
        return key_for(self.folder, MANIFEST, key)

    def _rewrite_table(
        self, out: Path, table: StoredTable, changes: Sequence[ChangedRows], ids: Tensor
    ) -> StoredTable:
        packed, (rows, values, keys) = table.packed, _newest(changes)
        base = self._keys(table)
        now = base
        if base is not None and keys is not None:
            now = base.clone()
            now[rows] = keys
        gone = ids if now is None else torch.isin(now, ids).nonzero(as_tuple=True)[0]
        if not len(rows) and not len(gone):
            for file in table.files():
                linked(self.folder, out, file.path)
            return table
        stay = ~torch.isin(rows, gone)
        rows = torch.cat([rows[stay], gone])
        values = torch.cat(
            [values.view(-1, packed.row_bytes)[stay], zeros(packed).expand(len(gone), -1)]
        )
        source = self._rows(table)

        def parts() -> Iterator[Tensor]:
            for part in chunks(table.rows, table.width):
                chunk = torch.from_numpy(np.array(source[part]))
                here = (rows >= part.start) & (rows < part.stop)
                chunk[rows[here] - part.start] = values[here]
                yield chunk

        written = write_table(out, table.file.path, packed, parts())
        if now is None:
            return written
        now = now.clone()
        now[gone] = NO_KEY
        return replace(written, ids=write_ids(out, ids_path(table.file.path), now))

    def _keys(self, table: StoredTable) -> Tensor | None:
        """Return the (R,) ids that have the rows of a dynamic table; None of another one."""
        if table.ids is None:
            return None
        return read_keys(self.folder, table.ids, table.rows)

    def _rows(self, table: StoredTable) -> NDArray[np.uint8]:
        """Return the (R, row bytes) packed rows, mapped from their file."""
        shape = table.rows, table.packed.row_bytes
        path = self.folder / table.file.path
        return np.memmap(path, np.uint8, "r", offset=table.offset, shape=shape)


def held_in(
    table: PackedTable,
    rows: Tensor | None,
    packed: NDArray[np.uint8],
    keys: Tensor | None,
    ids: Tensor,
) -> Tensor:
    """Return the ids of which some packed rows hold anything.

    Args:
        rows: (U,) numbers of the packed rows; None where these are all rows of the table.
        packed: (U, row bytes).
        keys: (U,) ids that have the rows of a dynamic table; else None.
        ids: ids that are looked for.
    """
    if keys is not None:
        return keys[torch.isin(keys, ids)]
    if rows is None:
        # a later artifact of the table may be dynamic, and know more ids
        places = ids[(ids >= 0) & (ids < len(packed))]
    else:
        (places,) = torch.isin(rows, ids).nonzero(as_tuple=True)
    differs = (torch.from_numpy(packed[places.numpy()]) != zeros(table)).any(1)
    return (places if rows is None else rows[places])[differs]


def zeros(table: PackedTable) -> Tensor:
    """Return (1, row bytes) of a row of zeros."""
    return pack_rows(torch.zeros(1, table.width), table.kind, table.power)


def key_for(folder: Path, name: str, key: SigningKey | None) -> SigningKey | None:
    """Return the key to sign a copy of a document with; None where it is not signed.

    Raises:
        ConfigError: it is signed, and there is no key.
        ArtifactError: it is not signed with the key.
    """
    if not (folder / f"{name}{SUFFIX}").exists():
        return None
    if key is None:
        raise ConfigError(
            f"{folder / name} is signed; name the key with --signing-key, so that what takes its "
            "place is signed, too."
        )
    key.check(folder / name, (folder / name).read_bytes())
    return key


def _newest(changes: Sequence[ChangedRows]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the rows of one table that were changed, each once as it was changed last."""
    if not changes:
        return NONE, torch.empty(0, dtype=torch.uint8), None
    rows = torch.cat([change.rows for change in changes])
    rows, inverse = rows.unique(return_inverse=True)
    order = torch.arange(len(inverse))
    last = torch.zeros_like(rows).scatter_reduce_(0, inverse, order, "amax")
    keys = [change.keys for change in changes if change.keys is not None]
    values = torch.cat([change.packed for change in changes])[last]
    return rows, values, torch.cat(keys)[last] if keys else None
