"""`Artifact`: a folder that holds a model ready to be served, opened.

    manifest.json                written last; without it the folder is no artifact
    schema.json                  which columns are what, as in training
    dense.pt                     dense parameters by name; loads with weights_only=True
    dense.pt2                    the dense part as a torch.export program, where the model exports
    compiled.pt2                 the dense part as machine code, where that was asked for
    tables/0000-user.arrow       packed rows of table "user": one column, one record batch

Every byte is checked when it is opened: by then all files are in memory, where the lookups read the
tables in place.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import cast

import torch
from torch import Tensor

from rayrec.checks import absolute_path, is_uri
from rayrec.errors import ArtifactError, ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.quant import PackedTables, QuantEmbeddingBagCollection, QuantEmbeddingCollection
from rayrec.serve.manifest import BAGS, MANIFEST, Manifest, StoredCollection, StoredFile
from rayrec.serve.mapping import map_files, populate, read_ahead
from rayrec.storage import one_line

DENSE, PROGRAM, COMPILED, SCHEMA = "dense.pt", "dense.pt2", "compiled.pt2", "schema.json"
_AGAIN = "Copy it again, or export the checkpoint again."


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """An opened artifact.

    Attributes:
        folder: where it lies.
        manifest: what it says of itself.
        packed: the tables, mapped read-only.
        schema: which columns are what; None where the model was exported without.
    """

    folder: Path
    manifest: Manifest
    packed: PackedTables
    schema: FeatureSchema | None

    def collections(self) -> dict[str, QuantEmbeddingBagCollection | QuantEmbeddingCollection]:
        """The collections of the model, by their names in it."""
        return {one.name: self._collection(one) for one in self.manifest.collections}

    def _collection(
        self, stored: StoredCollection
    ) -> QuantEmbeddingBagCollection | QuantEmbeddingCollection:
        by_name = {table.name: table for table in self.packed.tables}
        own = PackedTables(tuple(by_name[name] for name, _, _ in stored.tables), self.packed.data)
        tables = stored.configs(by_name)
        if stored.kind == BAGS:
            weighted = stored.is_weighted
            return QuantEmbeddingBagCollection(tables, own, weighted)  # type: ignore[arg-type]
        return QuantEmbeddingCollection(tables, own, stored.need_indices)  # type: ignore[arg-type]

    def dense(self) -> dict[str, Tensor]:
        """Dense parameters and buffers by their names in the model.

        Raises:
            ArtifactError: the file cannot be loaded.
        """
        path = self.folder / self.manifest.dense.path
        try:
            content = torch.load(
                io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True
            )
            return cast("dict[str, Tensor]", content)
        except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be loaded: {one_line(error)}. {_AGAIN}") from error


def open_artifact(
    path: str | os.PathLike[str], *, verify: bool = True, fill: bool = True, name: str = MANIFEST
) -> Artifact:
    """Open the artifact in a local folder.

    Args:
        verify: compare the sha256 of every file with that of the manifest.
        fill: have all pages of the tables in memory before this returns.
        name: of the manifest; another one while an export is not complete.
    Raises:
        ConfigError: the path is no local one.
        ArtifactError: there is no artifact, of this version; or a file is missing or damaged.
    """
    folder = local_folder("the artifact", path)
    manifest = read_manifest(folder, name)
    for file in manifest.files():
        _check_size(folder, file)
    tables = manifest.tables
    try:
        data, starts = map_files([folder / table.file.path for table in tables])
    except OSError as error:
        raise ArtifactError(f"{folder}: {one_line(error)}. {_AGAIN}") from error
    if verify:
        _verify(folder, manifest, data, starts)
    if fill:
        populate(data)
    placed = [
        replace(table.packed, start=start + table.offset)
        for table, start in zip(tables, starts, strict=True)
    ]
    schema = None
    if manifest.schema is not None:
        schema = FeatureSchema.load(folder / manifest.schema.path)
    return Artifact(folder, manifest, PackedTables(tuple(placed), data), schema)


def local_folder(what: str, path: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder whose files are to be mapped.

    Raises:
        ConfigError: the path is empty, or a URI.
    """
    whole = absolute_path(what, path)
    if is_uri(whole):
        raise ConfigError(
            f"{what} {whole} is on another file system; tables are mapped from a local disk. Name "
            "a local folder, and copy it from or to the other one."
        )
    return Path(whole)


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """What the artifact in a folder says of itself.

    Raises:
        ArtifactError: there is none, or none of this version.
    """
    try:
        text = (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{folder} has no file {MANIFEST}: the path is wrong, or the export was cut short. "
            "Name a folder that rayrec export wrote."
        ) from None
    except OSError as error:
        raise ArtifactError(f"{folder}/{MANIFEST} cannot be read: {one_line(error)}.") from error
    return Manifest.from_bytes(text, str(folder))


def _check_size(folder: Path, file: StoredFile) -> None:
    try:
        size = os.stat(folder / file.path).st_size
    except OSError:
        raise ArtifactError(
            f"{folder} has no file {file.path}, which its manifest names. {_AGAIN}"
        ) from None
    if size != file.bytes:
        raise ArtifactError(
            f"{folder}/{file.path} has {size} bytes, not {file.bytes}: it is truncated. {_AGAIN}"
        )


def _verify(folder: Path, manifest: Manifest, data: Tensor, starts: list[int]) -> None:
    """Compare the hash of every file with the manifest's, on all cores, as they are read."""
    mapped = data.numpy().data
    places = {
        table.file.path: mapped[start : start + table.file.bytes]
        for table, start in zip(manifest.tables, starts, strict=True)
    }

    def check(file: StoredFile) -> None:
        content: Mapping[str, memoryview] = places
        view = content[file.path] if file.path in content else (folder / file.path).read_bytes()
        if hashlib.sha256(view).hexdigest() != file.sha256:
            raise ArtifactError(
                f"{folder}/{file.path} is damaged: its sha256 is not the manifest's. {_AGAIN}"
            )

    files = manifest.files()
    # one thread more, which waits for the disk
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1, thread_name_prefix="verify") as pool:
        pool.submit(read_ahead, [folder / file.path for file in files])
        for _ in pool.map(check, files):
            pass
