"""`Staging`: new folders that take the places of old ones, whatever moment the process is killed.

    .erasure/new/           folders, written whole before any old one is touched
    .erasure/journal.json   which folder goes where; from here on the erasure ends
    .erasure/old/           folders that were moved away
    .erasure/receipt.json   the journal after the last move; from here on all is deleted

A folder moves by one rename, so nobody finds half of one. A process that was killed before it had
written the journal has changed nothing. After that the moves are done again, and those that were
done before are passed over. While a journal is there, no run starts in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rayrec.driver.run_folder import ERASURE, JOURNAL
from rayrec.errors import SaveError
from rayrec.storage import one_line, sync, write_whole

_NEW, _OLD, _RECEIPT = "new", "old", "receipt.json"
Move = tuple[str, str]  # a folder, and where it goes, below the root


@dataclass(slots=True)
class Found:
    """What files hold of some ids.

    Attributes:
        rows_scanned: rows that were read.
        rows: number of rows by file, of those that have any.
        ids: ids that were found, by table.
    """

    rows_scanned: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    ids: dict[str, set[int]] = field(default_factory=dict)

    def add(self, path: str, table: str, scanned: int, ids: Tensor) -> None:
        """Count rows of a file that were read, and the ids among them."""
        self.rows_scanned += scanned
        if len(ids):
            self.rows[path] = self.rows.get(path, 0) + len(ids)
            self.ids.setdefault(table, set()).update(ids.tolist())

    def include(self, other: Found) -> None:
        """Count what other files hold."""
        self.rows_scanned += other.rows_scanned
        self.rows |= other.rows
        for table, ids in other.ids.items():
            self.ids.setdefault(table, set()).update(ids)


def linked(source: Path, target: Path, path: str) -> None:
    """Have a file of one folder in another one, without a copy where the file system can.

    Raises:
        OSError: the file system refuses.
    """
    (target / path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source / path, target / path)
    except OSError:
        shutil.copy2(source / path, target / path)


class Staging:
    """New folders below a root.

    Args:
        root: local folder.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, root / ERASURE

    def new(self, path: str) -> Path:
        """Return where a new folder is written that shall lie at a path below the root."""
        return self._folder / _NEW / path

    def added(self, path: str) -> Move:
        """Return the move that puts a new folder into its place."""
        return f"{ERASURE}/{_NEW}/{path}", path

    def removed(self, path: str) -> Move:
        """Return the move that takes an old folder away."""
        return path, f"{ERASURE}/{_OLD}/{path}"

    def finish_last(self) -> str | None:
        """Finish what an erasure that was cut short has begun, or remove it.

        Returns:
            the name of its receipt; None where it had changed nothing.
        Raises:
            SaveError: the file system refuses.
        """
        for name in (JOURNAL, _RECEIPT):
            if (self._folder / name).exists():
                return self._finish()
        self.clear()
        return None

    def clear(self) -> None:
        """Remove new folders that go nowhere."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self, moves: Sequence[Move], receipt: Any, name: str) -> None:
        """Put all new folders into their places, delete the old ones, and leave a receipt.

        Args:
            moves: in this order.
            receipt: JSON data.
            name: name of the file for the receipt in the root.
        Raises:
            SaveError: the file system refuses.
        """
        try:
            for folder, _, files in os.walk(self._folder, topdown=False):
                for file in files:
                    sync(Path(folder) / file)
                sync(Path(folder))
        except OSError as error:
            raise SaveError(f"cannot write to {self._folder}: {one_line(error)}.") from error
        journal = {"moves": moves, "receipt": receipt, "name": name}
        try:
            write_whole("the journal", str(self._folder / JOURNAL), json.dumps(journal))
        except SaveError:
            self.clear()  # nothing has changed, and a full disk needs the room
            raise
        sync(self._folder / JOURNAL)
        sync(self._folder)
        self._finish()

    def _finish(self) -> str:
        journal, done = self._folder / JOURNAL, self._folder / _RECEIPT
        try:
            if not done.exists():
                for source, target in json.loads(journal.read_text())["moves"]:
                    self._move(self._root / source, self._root / target)
                os.rename(journal, done)
                sync(self._folder)
            said = json.loads(done.read_text())
            for name in (_OLD, _NEW):
                if (self._folder / name).exists():
                    shutil.rmtree(self._folder / name)
            name = str(said["name"])
            text = json.dumps(said["receipt"], indent=1) + "\n"
            write_whole("the receipt", str(self._root / name), text)
            sync(self._root)
            shutil.rmtree(self._folder)
        except OSError as error:
            raise SaveError(
                f"an erasure in {self._root} is not finished: {one_line(error)}. Run it again."
            ) from error
        return name

    def _move(self, source: Path, target: Path) -> None:
        """Move a folder, unless that was done before."""
        if target.exists() or not source.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        sync(source.parent)
        sync(target.parent)
