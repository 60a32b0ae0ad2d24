"""JSON records that have the sha256 of their own text: manifests of artifacts, publications."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from rayrec.errors import ArtifactError
from rayrec.fields.misfit import Misfit
from rayrec.fields.reading import read_record
from rayrec.fields.writing import record_of
from rayrec.serve.files import StoredFile, read_plain
from rayrec.serve.signing import SigningKey
from rayrec.storage import one_line, sync

PARTIAL = ".partial"  # ends the name of a record that is not complete


class Form(NamedTuple):
    """A kind of document.

    Attributes:
        file: its name in its folder.
        format: what it says of itself.
        versions: those that are read, the newest last.
        folder: what its folder is called.
        wanted, other_version, again: what to do where a folder has none, one of another version, or
            a damaged one.
    """

    file: str
    format: str
    versions: tuple[int, ...]
    folder: str
    wanted: str
    other_version: str
    again: str


class SealedRecord(ABC):
    """A dataclass that one JSON file of a folder holds, sealed by the sha256 of its text.

    Attributes:
        FORM: kind of the file.
        sha256: hash of the text, without this field; "" before it is sealed.
    """

    __slots__ = ()
    FORM: ClassVar[Form]
    sha256: str

    @abstractmethod
    def files(self) -> list[StoredFile]:
        """Return the other files of its folder."""

    @abstractmethod
    def check(self, where: str) -> None:
        """Check what the types of the fields do not say.

        Args:
            where: its folder.
        Raises:
            ValueError: a value cannot be. ArtifactError: it contradicts itself.
        """

    def sealed(self) -> Self:
        """Return the same record with its sha256."""
        return replace(self, sha256=_fingerprint(self._body()))  # type: ignore[type-var]

    def _body(self) -> dict[str, Any]:
        """Return the fields of the text, without the sha256."""
        body = {"format": self.FORM.format, "version": self.FORM.versions[-1]} | record_of(self)
        del body["sha256"]
        return body

    def _sealed_body(self) -> dict[str, Any]:
        """Return the fields of the text with the sha256, of a sealed record."""
        assert self.sha256, "a record is sealed before it is written"
        return self._body() | {"sha256": self.sha256}

    def to_bytes(self) -> bytes:
        """Return the text of the file, of a sealed record."""
        return (json.dumps(self._sealed_body(), indent=1) + "\n").encode()

    def write(self, folder: Path, key: SigningKey | None) -> None:
        """Write the record so that it appears whole or not at all, when all else is on disk.

        Args:
            key: key to sign it with; None signs none.
        Raises:
            OSError: the file system refuses.
        """
        path, text = folder / self.FORM.file, self.to_bytes()
        partial = Path(f"{path}{PARTIAL}")
        partial.write_bytes(text)
        written = [folder / file.path for file in self.files()]
        if key is not None:
            written.append(key.sign(path, text))
        for one in (*written, partial, *{one.parent for one in written}, folder):
            sync(one)
        os.replace(partial, path)
        sync(folder)

    @classmethod
    def read_file(cls, folder: Path, key: SigningKey | None = None) -> Self:
        """Read the record of a folder.

        Args:
            key: key that it has to be signed with; None asks for none.
        Raises:
            ArtifactError: there is none, of these versions, or it is damaged or not signed.
        """
        form = cls.FORM
        path = folder / form.file
        try:
            text = read_plain(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactError(
                f"{folder} has no file {form.file}: the path is wrong, or the {form.folder} was "
                f"cut short. {form.wanted}"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {one_line(error)}. {form.again}") from None
        if key is not None:
            key.check(path, text)
        return cls.from_bytes(text, str(folder))

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Self:
        """Parse the text of a record.

        Args:
            where: its folder.
        Raises:
            ArtifactError: it is none, of another version, or damaged.
        """
        try:
            record = read_record(cls, _body_of(text, cls.FORM, where))
            for file in record.files():
                file.check(f"{where}/{cls.FORM.file}", cls.FORM.folder)
            record.check(where)
        except (ValueError, RecursionError) as error:
            what = str(error) if isinstance(error, Misfit) else f"{error!r}."
            raise ArtifactError(
                f"{where}/{cls.FORM.file} cannot be read: {what} {cls.FORM.again}"
            ) from error
        return record


def _body_of(text: bytes, form: Form, where: str) -> dict[str, Any]:
    """Return the fields without the head, when the text is what was written."""
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError("it is no object of JSON")
    if body.get("format") != form.format:
        raise ArtifactError(
            f"{where}/{form.file} is no {form.format} but says format={body.get('format')!r}. "
            f"{form.wanted}"
        )
    if body.get("version") not in form.versions:
        raise ArtifactError(
            f"{where} has {form.folder} version {body.get('version')!r}; this rayrec reads "
            f"versions {form.versions[0]} to {form.versions[-1]}. {form.other_version}"
        )
    sha256 = body.pop("sha256", None)
    if sha256 != _fingerprint(body):
        raise ArtifactError(
            f"{where}/{form.file} is damaged: its sha256 is not the one that it says. {form.again}"
        )
    del body["format"], body["version"]
    return body | {"sha256": sha256}


def _fingerprint(body: dict[str, Any]) -> str:
    """Return the sha256 of JSON data, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
