"""`Publication`: the record of one link of a chain.

    base-00000001/     an artifact, and publication.json
    delta-00000002/    tables/0000-user-0.arrow, dense.safetensors and publication.json

publication.json is the last file written. It names the publication before by the sha256 of its
text, every file by its own, and has a sha256 of its own text. So whoever holds that of the newest
one holds those of all bytes of the chain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayrec.errors import ArtifactError
from rayrec.serve.manifest import StoredFile, fingerprint

PUBLICATION = "publication.json"
FORMAT, VERSION = "rayrec.publication", 2
_READ = (1, VERSION)  # version 1 has the dense part as torch.save writes it
BASE, DELTA = "base", "delta"
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
class Publication:
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
        tables: changed tables of a delta, in the order of the artifact.
        dense: file of a delta's dense parameters.
        sha256: hash of the text, without this field.
    """

    kind: str
    run: str
    seq: int
    parent: str
    artifact: str
    from_step: int
    to_step: int
    time: float
    tables: tuple[ChangedTable, ...] = ()
    dense: StoredFile | None = None
    sha256: str = ""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.kind}-{self.seq:08d}"

    @property
    def version(self) -> str:
        """Name of these weights on servers: the step, and the first digits of the sha256."""
        return f"{self.to_step}-{self.sha256[:12]}"

    def files(self) -> list[StoredFile]:
        """Return every file of a delta but publication.json; a base has its own manifest."""
        files = [file for table in self.tables for file in table.files]
        return files if self.dense is None else [*files, self.dense]

    def sealed(self) -> Publication:
        """Return the same publication with its sha256."""
        return replace(self, sha256=fingerprint(self._body()))

    def to_bytes(self) -> bytes:
        """Return the text of publication.json, for a sealed publication."""
        assert self.sha256, "a publication is sealed before it is written"
        return (json.dumps(self._body() | {"sha256": self.sha256}, indent=1) + "\n").encode()

    def _body(self) -> dict[str, Any]:
        body = {"format": FORMAT, "version": VERSION} | asdict(self)
        del body["sha256"]
        # in the form that is read back: JSON makes lists of tuples
        whole: dict[str, Any] = json.loads(json.dumps(body))
        return whole

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Publication:
        """Parse publication.json.

        Raises:
            ArtifactError: it is none, of another version, or damaged.
        """
        again = "Copy it again."
        try:
            body = json.loads(text)
            if body.get("format") != FORMAT:
                raise ArtifactError(
                    f"{where}/{PUBLICATION} is no {FORMAT} but says format={body.get('format')!r}. "
                    "Name a folder that training publishes into."
                )
            version = body["version"]
            if version not in _READ:
                raise ArtifactError(
                    f"{where} has publication version {version}; this rayrec reads versions 1 to "
                    f"{VERSION}. Follow it with the rayrec that trains."
                )
            sha256 = body.pop("sha256")
            if sha256 != fingerprint(body):
                raise ArtifactError(
                    f"{where}/{PUBLICATION} is damaged: its sha256 is not the one that it says. "
                    f"{again}"
                )
            dense = body["dense"]
            plain = ("kind", "run", "seq", "parent", "artifact", "from_step", "to_step", "time")
            publication = cls(
                **{key: body[key] for key in plain},
                tables=tuple(_table_of(entry) for entry in body["tables"]),
                dense=None if dense is None else StoredFile(**dense),
                sha256=sha256,
            )
            publication._check_places(where)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{where}/{PUBLICATION} cannot be read: {error!r}."
            raise ArtifactError(f"{what} {again}") from error
        return publication

    def _check_places(self, where: str) -> None:
        texts = self.kind, self.run, self.parent, self.artifact, *(t.name for t in self.tables)
        numbers = self.seq, self.from_step, self.to_step, *(t.rows for t in self.tables)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a name is no text")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("a number is no whole one")
        if type(self.time) not in (int, float) or not 0 <= self.time < 1e18:
            raise ValueError(f"the time is {self.time!r}")
        if place_of(self.name) is None or (self.kind == DELTA) != (self.dense is not None):
            raise ArtifactError(
                f"{where}/{PUBLICATION} is of kind {self.kind!r} and number {self.seq!r}, which no "
                "publication is."
            )
        for file in self.files():
            file.check(f"{where}/{PUBLICATION}", "publication")


def place_of(name: str) -> tuple[str, int] | None:
    """Return kind and number from the name of a publication's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def _table_of(entry: Mapping[str, Any]) -> ChangedTable:
    files = tuple(StoredFile(**file) for file in entry["files"])
    return ChangedTable(entry["name"], entry["power"], entry["rows"], files)
