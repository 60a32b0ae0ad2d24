"""`Artifact`: a folder that holds a model ready to be served, opened.

    manifest.json                written last; without it the folder is no artifact
    schema.json                  which columns are what, as in training
    dense.safetensors            dense parameters by name
    dense.pt2                    the dense part as a torch.export program, where the model exports
    compiled.pt2                 the dense part as machine code, where that was asked for
    tables/0000-user.arrow       packed rows of table "user": one column, one record batch
    tables/0000-user-ids.arrow   whose the rows are, of a dynamic table

All files are read when it is opened, each byte once: what was checked is what is kept in memory.
The folder is not looked at afterwards, so that whoever writes to it changes nothing that is served.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayrec.checks import absolute_path, is_uri
from rayrec.errors import ArtifactError, ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.quant import (
    Packed,
    PackedTable,
    PackedTables,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
)
from rayrec.quant.ids import PackedIds, bytes_of_ids
from rayrec.quant.tables import laid_out
from rayrec.serve.dense_file import loaded_dense
from rayrec.serve.files import StoredFile
from rayrec.serve.manifest import BAGS, Manifest, StoredCollection
from rayrec.serve.sealed_memory import TableMemory, populate, read_ahead
from rayrec.serve.signing import SigningKey
from rayrec.serve.stored import read_keys, read_stored, read_table
from rayrec.storage import one_line

DENSE, SCHEMA = "dense.safetensors", "schema.json"
# these two run code of whoever exported them when they are loaded
PROGRAM, COMPILED = "dense.pt2", "compiled.pt2"
_AGAIN = "Copy it again, or export the checkpoint again."


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """Opened artifact; a pickled one shares its tables with the process that receives it.

    Attributes:
        folder: folder that it was read from.
        manifest: its manifest.
        packed: its tables, read-only.
        schema: schema of the columns; None if the model was exported without one.
        content: bytes of every other file, by path in the folder.
        memory: memory of the tables; None if another object holds them.
        trusted: it may run code of whoever exported it.
    """

    folder: Path
    manifest: Manifest
    packed: PackedTables
    schema: FeatureSchema | None
    content: Mapping[str, bytes]
    memory: TableMemory | None
    trusted: bool

    def __reduce__(self) -> tuple[Callable[..., Artifact], tuple[object, ...]]:
        assert self.memory is not None, "tables of somebody else's are not sent"
        parts = self.folder, self.manifest, self.packed.tables, self.content, self.memory
        return _held, (*parts, self.trusted)

    def collections(self) -> dict[str, Packed]:
        """Return the collections of the model, by their names in it."""
        return {one.name: self._collection(one) for one in self.manifest.collections}

    def _collection(self, stored: StoredCollection) -> Packed:
        by_name = {table.name: table for table in self.packed.tables}
        own = PackedTables(tuple(by_name[name] for name, _, _ in stored.tables), self.packed.data)
        tables = stored.configs(by_name)
        if stored.kind == BAGS:
            return QuantEmbeddingBagCollection(tables, own, stored.is_weighted)
        return QuantEmbeddingCollection(tables, own, stored.need_indices)

    def dense(self) -> dict[str, Tensor]:
        """Return the dense parameters and buffers, by their names in the model.

        Raises:
            ArtifactError: the file cannot be loaded.
        """
        path = self.manifest.dense.path
        return loaded_dense(self.content[path], str(self.folder / path), trusted=self.trusted)


def open_artifact(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    trusted: bool = True,
    signing_key: str | None = None,
) -> Artifact:
    """Read the artifact in a local folder into memory.

    Args:
        verify: compare the sha256 of every file with that of the manifest.
        trusted: allow it to run code of whoever exported it; see `Predictor.load`.
        signing_key: place of the key that its manifest has to be signed with; None asks for none.
    Raises:
        ConfigError: the path is no local one, or there is no key, or one with `verify=False`.
        ArtifactError: there is no artifact, of this version; or a file is missing or damaged, or
            the manifest is not signed; or the memory does not hold the tables.
    """
    folder = local_folder("the artifact", path)
    if signing_key is not None and not verify:
        raise ConfigError(
            "verify=False with a signing key: the signature vouches for the hashes of the files, "
            "which are not compared. Leave verify=False out."
        )
    manifest = Manifest.read_file(folder, SigningKey.read(signing_key))
    return read_artifact(folder, manifest, verify=verify, trusted=trusted)


def read_artifact(
    folder: Path, manifest: Manifest, *, verify: bool = True, trusted: bool = True
) -> Artifact:
    """Read an artifact as `open_artifact` does, by a manifest that was read before."""
    for file in manifest.files():
        _check_size(folder, file)
    tables, num_bytes = laid_out([table.packed for table in manifest.tables])
    try:
        memory = TableMemory(num_bytes)

        def table(number: int) -> None:
            def put(piece: memoryview, place: int) -> None:
                memory.write(piece, tables[number].start + place)

            stored = manifest.tables[number]
            read_table(folder, stored, put, verify=verify)
            if stored.ids is not None:
                keys = read_keys(folder, stored.ids, stored.rows, verify=verify)
                ids = torch.empty(bytes_of_ids(stored.rows), dtype=torch.uint8)
                if not PackedIds(ids, stored.rows).fill(keys):
                    raise ArtifactError(
                        f"{folder}/{stored.ids.path} gives two rows to one id. {_AGAIN}"
                    )
                memory.write(ids.numpy().data, tables[number].ids.start)

        # one thread more, which waits for the disk
        with ThreadPoolExecutor((os.cpu_count() or 1) + 1, thread_name_prefix="read") as pool:
            pool.submit(read_ahead, [folder / file.path for file in manifest.files()])
            reading = pool.map(table, range(len(tables)))
            content = {
                f.path: read_stored(folder, f, verify=verify) for f in manifest.other_files()
            }
            list(reading)  # keeps no error, whose frames would keep the tables
        return _held(folder, manifest, tables, content, memory, trusted)
    except OSError as error:
        raise ArtifactError(
            f"the {num_bytes / 1e9:.1f} GB of tables of {folder} do not go into memory: "
            f"{one_line(error)}. Take a machine with more, or narrower types (--dtype)."
        ) from error


def local_folder(what: str, path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder on a local disk.

    Raises:
        ConfigError: the path is empty, or a URI.
    """
    whole = absolute_path(what, path)
    if is_uri(whole):
        raise ConfigError(
            f"{what} {whole} is on another file system; tables are read from a local disk. Name "
            "a local folder, and copy it from or to the other one."
        )
    return Path(whole)


def _check_size(folder: Path, file: StoredFile) -> None:
    try:
        said = os.stat(folder / file.path)
    except OSError:
        raise ArtifactError(
            f"{folder} has no file {file.path}, which its manifest names. {_AGAIN}"
        ) from None
    size = said.st_size
    if not stat.S_ISREG(said.st_mode):  # reading a pipe would wait for ever
        raise ArtifactError(f"{folder}/{file.path} is no plain file. {_AGAIN}")
    if size != file.bytes:
        raise ArtifactError(
            f"{folder}/{file.path} has {size} bytes, not {file.bytes}: it is truncated. {_AGAIN}"
        )


def _held(
    folder: Path,
    manifest: Manifest,
    tables: tuple[PackedTable, ...],
    content: Mapping[str, bytes],
    memory: TableMemory,
    trusted: bool,
) -> Artifact:
    """Return the artifact whose tables a memory holds; unpickles an `Artifact`."""
    schema, stored = None, manifest.schema
    if stored is not None:
        text = content[stored.path].decode(errors="replace")
        schema = FeatureSchema.from_json(text, str(folder / stored.path))
    packed = PackedTables(tables, memory.sealed())
    populate(packed.data)
    return Artifact(folder, manifest, packed, schema, content, memory, trusted)
