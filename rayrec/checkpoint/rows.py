"""`TableReader`: rows of a saved table as float32, in order, from whatever rectangles hold them.

It reads one record batch of a file at a time, so a table of any size passes through bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.chain import Chain
from rayrec.checkpoint.compatibility import check_whole
from rayrec.checkpoint.entries import FileEntry
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.paths import located
from rayrec.shards.state import WEIGHT


class TableReader:
    """Reads rows of the tables of one checkpoint.

    Args:
        path: the checkpoint; local path or URI.
        manifest: manifest of the checkpoint.
    Raises:
        DamagedCheckpointError: a file is missing or truncated.
    """

    def __init__(
        self, path: str, manifest: Manifest, *, filesystem: fs.FileSystem | None = None
    ) -> None:
        path = located(path, filesystem)
        self._chain = Chain.of(path, manifest, filesystem)
        check_whole(path, manifest, filesystem=filesystem)
        self._files = self._chain.base.files_by_table()
        self._open: dict[str, _OpenFile] = {}

    def read(self, table: str, rows: range) -> Tensor:
        """Read some rows of a table.

        Args:
            rows: row numbers in [0, num_embeddings); in ascending parts each batch is read once.
        Returns:
            (len(rows), embedding_dim) float32.
        Raises:
            CheckpointError: the storage refuses.
            DamagedCheckpointError: the bytes are not those that were written.
        """
        files = self._files[table]
        self._close_all_but(table)
        out = torch.empty(len(rows), max(file.cols.stop for file in files))
        for file in files:
            first = max(rows.start, file.rows.start)
            last = min(rows.stop, file.rows.stop)
            if first >= last:
                continue
            if file.path not in self._open:
                self._open[file.path] = _OpenFile(self._chain, file)
            opened = self._open[file.path]
            while first < last:
                batch, held = opened.batch_of(first)
                stop = min(last, held.stop)
                part = batch[first - held.start : stop - held.start]
                place = slice(first - rows.start, stop - rows.start)
                out[place, file.cols.start : file.cols.stop].copy_(part)
                first = stop
        return out

    def read_whole(self, table: str, columns: Sequence[str]) -> list[Tensor]:
        """Read columns of one value per row, such as the ids of a dynamic table.

        Returns:
            (num_embeddings,) of each column, in its type.
        Raises:
            CheckpointError, DamagedCheckpointError: the errors of `read`.
        """
        found = self._chain.whole_columns(table, columns, verify=True)
        return [found[column] for column in columns]

    def _close_all_but(self, table: str) -> None:
        kept = {file.path for file in self._files[table]}
        self._open = {path: file for path, file in self._open.items() if path in kept}


class _OpenFile:
    """One shard file, and the record batch of it that was read last."""

    def __init__(self, chain: Chain, entry: FileEntry) -> None:
        self._rectangle, self._entry = chain.open(entry, verify=True), entry
        self._number, self._weight = -1, torch.empty(0)

    def batch_of(self, row: int) -> tuple[Tensor, range]:
        """The weights of the record batch that holds a row of the table, and its rows."""
        number = (row - self._entry.rows.start) // self._entry.batch_rows
        if number != self._number:
            self._number, self._weight = number, self._rectangle.read(number)[WEIGHT]
        return self._weight, self._entry.batch_range(number)
