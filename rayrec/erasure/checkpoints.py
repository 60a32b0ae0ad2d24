"""The rows of ids in checkpoints: found, and taken out of a copy.

A row of a dynamic table becomes free, and a candidate is forgotten; a file of all rows then holds
neither. Other rows go back to their first values, as the seed and the recipe in the checkpoint say,
or to zeros where it says neither; the state of their optimizer is zeros. An increment is treated
like a checkpoint of all rows, since its files say whose the rows are that they hold.

Files without such a row are linked, and not copied.

    # N rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rayrec.checkpoint.entries import ROW, FileEntry, Parent
from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.checkpoint.rewrite import read_numbered, rewrite_shard
from rayrec.checkpoint.store import Store
from rayrec.data import FeatureSchema
from rayrec.driver.planning import find_tables
from rayrec.dynamic.columns import NO_KEY, lanes_of
from rayrec.dynamic.kinds import KINDS
from rayrec.erasure.keys import StoredIds, TableSize
from rayrec.erasure.staging import Found, linked
from rayrec.errors import ConfigError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules.init import fill
from rayrec.serve.recipes import recipe_in
from rayrec.shards.state import IDS, WEIGHT
from rayrec.streams.dataset import STREAM_SCHEMA


class StoredCheckpoint:
    """A checkpoint in a local folder.

    Attributes:
        manifest: its manifest.
        sha256: hash of the text of its manifest, by which increments name it.
    Raises:
        CheckpointError: the manifest cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, Store(str(folder))
        text = self._store.read_all(MANIFEST)
        self.manifest = Manifest.from_bytes(text, str(folder))
        self.sha256 = hashlib.sha256(text).hexdigest()

    def schema(self) -> FeatureSchema | None:
        """Return the schema in its recipe; None of a model of the user's code."""
        for said in self.manifest.extras.values():
            if isinstance(said, Mapping) and isinstance(said.get("schema"), str):
                return FeatureSchema.from_json(said["schema"], f"the schema of {self._folder}")
        return None

    def stream_schema(self) -> FeatureSchema | None:
        """Return the schema of the stream that its run was fed by; None where it says none."""
        text = self.manifest.extras.get(STREAM_SCHEMA)
        if not isinstance(text, str):
            return None
        return FeatureSchema.from_json(text, f"the schema of the stream of {self._folder}")

    def tables(self) -> list[TableSize]:
        """Return its tables."""
        tables = self.manifest.tables
        return [TableSize(t.name, t.num_embeddings, t.blocks is not None) for t in tables]

    def find(self, wanted: Mapping[str, StoredIds]) -> Found:
        """Read the files of the tables of ids, and return what they hold of them.

        Raises:
            CheckpointError, DamagedCheckpointError: a file cannot be read, or is damaged.
        """
        found = Found()
        for entry in self.manifest.files:
            if entry.table in wanted:
                for rows, data in read_numbered(self._store, entry):
                    held = self._erase(entry, wanted[entry.table].ids, rows, data)
                    found.add(entry.path, entry.table, len(rows), held)
        return found

    def rewrite(
        self, out: Path, wanted: Mapping[str, StoredIds], found: Found, parent: Parent | None
    ) -> str:
        """Write the checkpoint without what was found in it.

        Args:
            out: new folder.
            parent: checkpoint that an increment adds to.
        Returns:
            the sha256 of the text of its manifest.
        Raises:
            CheckpointError, DamagedCheckpointError: a file cannot be read, or is damaged.
            OSError: the file system refuses.
        """
        target, files = Store(str(out)), list[FileEntry]()
        linked(self._folder, out, self.manifest.dense.path)
        for entry in self.manifest.files:
            if entry.path not in found.rows:
                linked(self._folder, out, entry.path)
                files.append(entry)
                continue

            def change(rows: Tensor, data: dict[str, Tensor], entry: FileEntry = entry) -> None:
                self._erase(entry, wanted[entry.table].ids, rows, data)

            files.append(rewrite_shard(self._store, target, entry, change))
        text = replace(self.manifest, files=tuple(files), parent=parent).to_bytes()
        target.publish(text)
        return hashlib.sha256(text).hexdigest()

    @cached_property
    def _configs(self) -> Mapping[str, BaseEmbeddingConfig]:
        """Configs of its tables by name, as far as it says how they begin."""
        try:
            tables = find_tables(recipe_in(self.manifest.extras, str(self._folder)))
        except ConfigError:
            schema = self.schema()
            tables = [] if schema is None else list(schema.tables)
        return {table.name: table for table in tables}

    def _erase(
        self, entry: FileEntry, ids: Tensor, rows: Tensor, data: dict[str, Tensor]
    ) -> Tensor:
        """Take the rows of ids out of some rows of a file, and return the ids that had any."""
        if IDS in data:
            lanes = [lane for kind in KINDS for lane in lanes_of(kind, data)]
            return torch.cat([_free(lane, ids, data) for lane in lanes])
        (places,) = torch.isin(rows, ids).nonzero(as_tuple=True)
        differs = torch.zeros(len(places), dtype=torch.bool)
        for name, values in data.items():
            if name != ROW and len(places):
                fresh = torch.zeros_like(values[places])
                if name == WEIGHT:
                    self._begin(fresh, entry, rows[places])
                differs |= (values[places] != fresh).view(len(places), -1).any(1)
                values[places] = fresh
        return rows[places[differs]]

    def _begin(self, weight: Tensor, entry: FileEntry, rows: Tensor) -> None:
        """Write the first values of (N,) rows, where they are known."""
        table, seed = self._configs.get(entry.table), self.manifest.cursor.get("seed")
        if table is not None and seed is not None:
            for place, row in enumerate(rows.tolist()):
                fill(weight[place : place + 1], seed, table, range(row, row + 1), entry.cols)


def _free(lane: str, ids: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Free the places of ids, or of candidates of a lane, and return the ids that had any."""
    key = f"{lane}_key"
    held = torch.isin(data[key], ids)
    found = data[key][held]
    for name, values in data.items():
        # values of rows belong to ids, and candidates have none
        is_own = name.rpartition("_")[0] == lane
        is_own |= lane == "id" and not name.startswith("candidate_")
        if name != ROW and is_own:
            values[held] = NO_KEY if name == key else 0
    return found
