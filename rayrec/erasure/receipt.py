"""`Receipt`: the record of an erasure, which names no key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# what an erasure does not reach
NOT_UNDONE = (
    "what dense parameters and rows of other ids have learned from the keys",
    "copies of these files elsewhere, snapshots and backups of the disk among them",
    "what servers hold in memory until they follow a newer version or start anew",
    "logs of servers, and of those who ask them",
    "the data that the run was trained on, and scores that were written of them",
)


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file that was written anew, added or removed.

    Attributes:
        path: its path below the folder.
        before, after: sha256 of its bytes; None where there was or is no file.
        rows: number of its rows that were of keys.
    """

    path: str
    before: str | None
    after: str | None
    rows: int


@dataclass(frozen=True, slots=True)
class ForgottenTable:
    """The ids of one table.

    Attributes:
        name: name of the table.
        ids: number of ids that were looked for.
        found: number of them that something was held of.
        found_now: number of them that something is held of afterwards.
        shared: number of those found that are buckets, whose rows other keys had as well.
    """

    name: str
    ids: int
    found: int
    found_now: int
    shared: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The record of an erasure.

    Attributes:
        rayrec: version of rayrec.
        time: seconds since 1970.
        folder: the folder.
        salt: text in front of each key before it is hashed.
        keys: sha256 of salt and key, by column of the key file.
        rows_scanned: number of rows that were read.
        tables: what was found, by table.
        files: files that changed.
        not_read: files that are part of no checkpoint, artifact or publication.
        not_undone: what an erasure does not reach.
    """

    rayrec: str
    time: float
    folder: str
    salt: str
    keys: Mapping[str, tuple[str, ...]]
    rows_scanned: int
    tables: tuple[ForgottenTable, ...]
    files: tuple[ChangedFile, ...]
    not_read: tuple[str, ...]
    not_undone: tuple[str, ...] = NOT_UNDONE

    def to_text(self) -> str:
        """Return the receipt in a few lines, for people."""
        lines = []
        for table in self.tables:
            shared = f", {table.shared} of them buckets of several keys" if table.shared else ""
            found = f"{table.found} of {table.ids} ids found{shared}, {table.found_now} now"
            lines.append(f"{table.name}: {found}")
        lines.append(f"{self.rows_scanned:,} rows read, {len(self.files)} files changed")
        if self.not_read:
            lines.append(f"not read: {', '.join(self.not_read)}")
        return "\n".join([*lines, "not undone:", *(f"  {one}" for one in self.not_undone)])
