"""`TableReader`: rows of a saved table as float32, in order, from whatever rectangles hold them.

It reads one record batch of a file at a time, so a table of any size passes through bounded memory.
"""

# N rows that are read, D width of the table

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.chain import Chain, Rectangle
from rayrec.checkpoint.compatibility import check_files
from rayrec.checkpoint.entries import FileEntry
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.paths import located
from rayrec.shards.overlap import within
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
        for link in self._chain.links:
            check_files(link, set(link.manifest.paths()))
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
            shared = range(max(rows.start, file.rows.start), min(rows.stop, file.rows.stop))
            if shared:
                for some, part in self._opened(file).parts(shared):
                    out[within(some, rows), file.cols.start : file.cols.stop].copy_(part[WEIGHT])
        return out

    def parts(self, table: str) -> Iterator[tuple[range, dict[str, Tensor]]]:
        """Yield all columns of a table in parts of its rows, in order.

        Of several column blocks, columns of values are joined, and row-wise state becomes its mean
        weighted by width, as in a restore.

        Returns:
            row numbers, and (N,) or (N, D) of each column in its type, which are not to be written.
        Raises:
            CheckpointError, DamagedCheckpointError: the errors of `read`.
        """
        self._close_all_but(table)
        for _, block in groupby(self._files[table], key=lambda file: file.rows):
            files = list(block)
            widths = [len(file.cols) for file in files]
            for number in range(len(files[0].marks) - 1):
                rows = files[0].batch_range(number)
                yield rows, _joined([self._opened(file).columns(rows) for file in files], widths)

    def read_whole(self, table: str, columns: Sequence[str]) -> list[Tensor]:
        """Read columns of one value per row, such as the ids of a dynamic table.

        Returns:
            (num_embeddings,) of each column, in its type.
        Raises:
            CheckpointError, DamagedCheckpointError: the errors of `read`.
        """
        found = self._chain.whole_columns(table, columns, verify=True)
        return [found[column] for column in columns]

    def _opened(self, file: FileEntry) -> _OpenFile:
        if file.path not in self._open:
            self._open[file.path] = _OpenFile(self._chain, file)
        return self._open[file.path]

    def _close_all_but(self, table: str) -> None:
        kept = {file.path for file in self._files[table]}
        self._open = {path: file for path, file in self._open.items() if path in kept}


class _OpenFile:
    """One shard file, and the record batch of it that was read last."""

    def __init__(self, chain: Chain, entry: FileEntry) -> None:
        self._rectangle, self._entry = Rectangle(chain, entry, verify=True), entry
        self._number, self._batch = -1, dict[str, Tensor]()

    def parts(self, rows: range) -> Iterator[tuple[range, dict[str, Tensor]]]:
        """Yield all columns of some rows of the table, record batch by record batch."""
        first = rows.start
        while first < rows.stop:
            number = (first - self._entry.rows.start) // self._entry.batch_rows
            if number != self._number:
                self._number, self._batch = number, self._rectangle.read(number)
            held = self._entry.batch_range(number)
            some = range(first, min(rows.stop, held.stop))
            place = within(some, held)
            yield some, {name: column[place] for name, column in self._batch.items()}
            first = some.stop

    def columns(self, rows: range) -> dict[str, Tensor]:
        """Return all columns of some rows."""
        parts = [part for _, part in self.parts(rows)]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _joined(blocks: Sequence[Mapping[str, Tensor]], widths: Sequence[int]) -> dict[str, Tensor]:
    """Return the columns of some rows of all column blocks.

    Args:
        widths: the columns of each block.
    """
    joined = dict(blocks[0])
    if len(blocks) == 1:
        return joined
    shares = torch.tensor(widths) / sum(widths)
    for name, column in joined.items():
        of_blocks = [block[name] for block in blocks]
        if column.dim() == 2:
            joined[name] = torch.cat(of_blocks, dim=1)
        # every block knows the same ids, which are whole numbers
        elif column.is_floating_point():
            joined[name] = (torch.stack(of_blocks, dim=1) @ shares.to(column.dtype)).to(
                column.dtype
            )
    return joined
