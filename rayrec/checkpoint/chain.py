"""A checkpoint with the checkpoints that it adds to: the base with all rows, then increments.

An increment names its parent's folder and the sha256 of its manifest, and each manifest guards its
files. So a chain is either what was saved, or found damaged. All links cut tables into the same
rectangles. A rectangle is read by the record batches of its base, in which the rows that increments
hold are replaced, oldest increment first. What reads checkpoints sees whole rows and knows nothing
of chains.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.entries import ROW, Column, FileEntry
from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.checkpoint.shardfile import ShardReader
from rayrec.checkpoint.store import Store
from rayrec.errors import CheckpointError, DamagedCheckpointError

# table, rows and columns of a rectangle, which all links of a chain have
_Key = tuple[str, range, range]


@dataclass(frozen=True, slots=True)
class Link:
    """One checkpoint of a chain; `files` are those of its manifest by their rectangle."""

    store: Store
    manifest: Manifest
    files: Mapping[_Key, FileEntry]

    @staticmethod
    def of(store: Store, manifest: Manifest) -> Link:
        """The link in a directory."""
        return Link(store, manifest, {_key(entry): entry for entry in manifest.files})


@dataclass(frozen=True, slots=True)
class Chain:
    """A checkpoint and what it adds to.

    Attributes:
        links: the base with all rows first, the checkpoint itself last.
    """

    links: tuple[Link, ...]

    @staticmethod
    def of(path: str, manifest: Manifest, filesystem: fs.FileSystem | None = None) -> Chain:
        """The chain of a checkpoint whose manifest is read, by the other manifests alone.

        Raises:
            DamagedCheckpointError: a link of it is missing, damaged or another than was saved.
        """
        links = [Link.of(Store(path, filesystem), manifest)]
        folder = str(path).rstrip("/")
        while links[0].manifest.parent is not None:
            child = links[0].manifest
            assert child.parent is not None
            folder, parent = _parent(folder, child, filesystem)
            _check_link(folder, parent.manifest, child)
            links.insert(0, parent)
        return Chain(tuple(links))

    @property
    def base(self) -> Manifest:
        """The manifest whose files hold all rows."""
        return self.links[0].manifest

    def whole_columns(self, table: str, names: Sequence[str], *, verify: bool) -> dict[str, Tensor]:
        """Read columns of one value per row, such as the ids of a dynamic table.

        Returns:
            name -> (num_embeddings,), in its type.
        Raises:
            CheckpointError, DamagedCheckpointError: the errors of `Rectangle.read`.
        """
        # every column block has them
        files = [file for file in self.base.files_by_table()[table] if file.cols.start == 0]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for file in sorted(files, key=lambda file: file.rows.start):
            rectangle = Rectangle(self, file, verify=verify)
            for number in range(len(file.marks) - 1):
                data = rectangle.read(number)
                for name, part in parts.items():
                    part.append(data[name].clone())
        return {name: torch.cat(part) for name, part in parts.items()}


class Rectangle:
    """One rectangle of a chain, read by the record batches of its base, also by several threads.

    Args:
        entry: its file in the base.
        verify: check the crc32 of every byte that is read.
    Raises:
        CheckpointError: the storage refuses.
        DamagedCheckpointError: a footer is not what was written.
    """

    def __init__(self, chain: Chain, entry: FileEntry, *, verify: bool) -> None:
        base, *increments = chain.links
        self._entry, self._base = entry, ShardReader(base.store, entry, verify=verify)
        self._increments = []
        for link in increments:
            own = link.files[_key(entry)]
            # a file without rows is only opened to see that it is what was written
            if own.held or verify:
                self._increments.append(_Increment(link.store, own, verify))

    def read(self, index: int) -> dict[str, Tensor]:
        """Record batch `index` of the base with all increments on top, by column name.

        Raises:
            CheckpointError: the storage refuses.
            DamagedCheckpointError: the bytes are not those that were written.
        """
        data = self._base.read(index)
        rows, copied = self._entry.batch_range(index), False
        for increment in self._increments:
            for part in increment.within(rows):
                if not copied:  # a mapped file is read-only
                    data, copied = {name: t.clone() for name, t in data.items()}, True
                places = part[ROW] - rows.start
                for name, tensor in data.items():
                    tensor[places] = part[name]
        return data


class _Increment:
    """The touched rows of one rectangle in one increment."""

    def __init__(self, store: Store, entry: FileEntry, verify: bool) -> None:
        self._entry, self._where = entry, store.path
        self._file = ShardReader(store, entry, verify=verify)
        # A batch of touched rows lies over many batches of the base, which are read in order.
        self._batch = lru_cache(maxsize=2)(self._read)

    def within(self, rows: range) -> Iterator[dict[str, Tensor]]:
        """The touched rows in a range of the table's rows, in parts."""
        firsts = self._entry.firsts or ()
        index = max(0, bisect_right(firsts, rows.start) - 1)
        while index < len(firsts) and firsts[index] < rows.stop:
            data = self._batch(index)
            bounds = torch.tensor([rows.start, rows.stop])
            start, stop = torch.searchsorted(data[ROW], bounds).tolist()
            if start < stop:
                yield {name: tensor[start:stop] for name, tensor in data.items()}
            index += 1

    def _read(self, index: int) -> dict[str, Tensor]:
        data = self._file.read(index)
        check_row_numbers(data[ROW], self._entry, index, self._where)
        return data


def check_row_numbers(rows: Tensor, entry: FileEntry, index: int, where: str) -> None:
    """Check that the row numbers of a record batch ascend and are those its manifest tells of.

    Raises:
        DamagedCheckpointError: they are not.
    """
    firsts = entry.firsts or ()
    ends = [*firsts[1:], entry.rows.stop]
    right = int(rows[0]) == firsts[index] and int(rows[-1]) < ends[index]
    if not right or not bool((rows.diff() > 0).all()):
        raise DamagedCheckpointError(
            f"{where}/{entry.path} has row numbers in batch {index} that are not those of its "
            "manifest. Restore an earlier checkpoint."
        )


def _parent(folder: str, child: Manifest, filesystem: fs.FileSystem | None) -> tuple[str, Link]:
    """The parent of an increment, which lies beside it, or one folder up for one set aside."""
    assert child.parent is not None
    beside = folder.rpartition("/")[0] or "."
    above = beside.rpartition("/")[0]
    wanted = f"{folder} is an increment on {child.parent.name}, which"
    for place in (beside, above) if "/set-aside-" in folder else (beside,):
        path = f"{place}/{child.parent.name}"
        store = Store(path, filesystem)
        try:
            text = store.read_all(MANIFEST)
        except DamagedCheckpointError:
            raise
        except CheckpointError:
            continue
        if hashlib.sha256(text).hexdigest() != child.parent.sha256:
            raise DamagedCheckpointError(
                f"{wanted} is another than it was saved on or is damaged. Restore an earlier "
                "checkpoint."
            )
        return path, Link.of(store, Manifest.from_bytes(text, path))
    raise DamagedCheckpointError(
        f"{wanted} is gone or cannot be read. Restore an earlier checkpoint."
    )


def _check_link(folder: str, parent: Manifest, child: Manifest) -> None:
    """Check that an increment is of its parent's tables and rectangles."""
    # steps descend, so a chain ends
    if parent.step >= child.step or parent.tables != child.tables:
        what = "steps or tables"
    elif _columns(parent.files) != _columns(child.files):
        what = "rectangles or columns"
    else:
        return
    raise DamagedCheckpointError(
        f"{folder} and the increment on it at step {child.step} differ in their {what}; a "
        "manifest was edited or written wrongly. Restore an earlier checkpoint."
    )


def _columns(files: Sequence[FileEntry]) -> dict[_Key, tuple[Column, ...]]:
    return {_key(f): tuple(c for c in f.columns if c.name != ROW) for f in files}


def _key(entry: FileEntry) -> _Key:
    return entry.table, entry.rows, entry.cols
