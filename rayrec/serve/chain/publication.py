"""`Publication`: the record of one link of a chain.

    base-00000001/     an artifact, and publication.json
    delta-00000002/    tables/0000-user-0.arrow, dense.safetensors and publication.json

publication.json is the last file written. It names the publication before by the sha256 of its
text, every file by its own, and has a sha256 of its own text. So whoever holds that of the newest
one holds those of all bytes of the chain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from rayrec.errors import ArtifactError
from rayrec.serve.files import StoredFile
from rayrec.serve.sealed import Form, SealedRecord

PUBLICATION = "publication.json"
BASE, DELTA = "base", "delta"


class ChainPlace(NamedTuple):
    """Place of a publication in its chain, by which folders sort."""

    seq: int
    kind: str

    @property
    def name(self) -> str:
        """Name of the folder."""
        return f"{self.kind}-{self.seq:08d}"


_NAME = re.compile(rf"({BASE}|{DELTA})-(\d{{8}})")


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """Rows of one table that a delta holds.

    Attributes:
        name: name of the table.
        power: power by which all of its rows are packed, unchanged ones included.
        rows: number of rows in all files together.
        files: Arrow files of row numbers and packed rows; no row is in two of them.
    """

    name: str
    power: int
    rows: int
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication(SealedRecord):
    """Record of one link of a chain.

    Attributes:
        kind: "base" or "delta".
        run: id of the chain's run, the same for all publications of a folder.
        seq: place in the chain, from 1.
        parent: sha256 of the publication before; "" of the first.
        artifact: sha256 of the manifest of the artifact: that of a base itself, or the one that a
            delta goes back to.
        from_step, to_step: steps whose changes it holds; a base has all up to `to_step`.
        time: seconds since 1970 when the weights were taken.
        event_time: time of the newest event that was trained on; None where training reads none.
        ingest_time: when the newest rows came out of their stream; None where they are no stream's.
        tables: changed tables of a delta, in the order of the artifact.
        dense: file of a delta's dense parameters.
        sha256: hash of the text, without this field.
    """

    FORM: ClassVar[Form] = Form(
        file=PUBLICATION,
        format="rayrec.publication",
        versions=(1, 2),  # version 1 has the dense part as torch.save writes it
        folder="publication",
        wanted="Name a folder that training publishes into.",
        other_version="Follow it with the rayrec that trains.",
        again="Copy it again.",
    )
    kind: str
    run: str
    seq: int
    parent: str
    artifact: str
    from_step: int
    to_step: int
    time: float
    event_time: int | None = None
    ingest_time: float | None = None
    tables: tuple[ChangedTable, ...] = ()
    dense: StoredFile | None
    sha256: str = ""

    @property
    def place(self) -> ChainPlace:
        """Place in the chain."""
        return ChainPlace(self.seq, self.kind)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.place.name

    @property
    def version(self) -> str:
        """Name of these weights on servers: the step, and the first digits of the sha256."""
        return f"{self.to_step}-{self.sha256[:12]}"

    def files(self) -> list[StoredFile]:
        """Return every file of a delta but publication.json; a base has its own manifest."""
        files = [file for table in self.tables for file in table.files]
        return files if self.dense is None else [*files, self.dense]

    def check(self, where: str) -> None:
        """Check numbers, and what belongs to its kind."""
        numbers = self.seq, self.from_step, self.to_step, *(t.rows for t in self.tables)
        if min(numbers) < 0:
            raise ValueError(f"{min(numbers)} is no number of rows or steps")
        if not 0 <= self.time < 1e18:
            raise ValueError(f"the time is {self.time!r}")
        if place_of(self.name) is None or (self.kind == DELTA) != (self.dense is not None):
            raise ArtifactError(
                f"{where}/{PUBLICATION} is of kind {self.kind!r} and number {self.seq!r}, which no "
                "publication is."
            )


def place_of(name: str) -> ChainPlace | None:
    """Return the place of the publication in a folder of this name; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else ChainPlace(int(match[2]), match[1])
