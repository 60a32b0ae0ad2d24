"""JSON documents that have the sha256 of their own text: manifests of artifacts, publications."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rayrec.errors import ArtifactError
from rayrec.fields.misfit import Misfit
from rayrec.fields.reading import read_record
from rayrec.serve.files import read_plain
from rayrec.serve.signing import SigningKey
from rayrec.storage import one_line


class Document(Protocol):
    """What a document says; a dataclass that has its `sha256`."""

    def check(self, where: str) -> None:
        """Check what the types of its fields do not say.

        Args:
            where: its folder.
        Raises:
            ValueError: a value cannot be. ArtifactError: it contradicts itself.
        """


D = TypeVar("D", bound=Document)


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

    def head(self) -> dict[str, Any]:
        """The first fields of a document that is written."""
        return {"format": self.format, "version": self.versions[-1]}

    def read_file(
        self, kind: type[D], folder: Path, key: SigningKey | None = None, name: str = ""
    ) -> D:
        """Read the document of a folder.

        Args:
            key: key that it has to be signed with; None asks for none.
            name: name of the file where it is not `file`.
        Raises:
            ArtifactError: there is none, of these versions, or it is damaged or not signed.
        """
        path = folder / (name or self.file)
        try:
            text = read_plain(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactError(
                f"{folder} has no file {self.file}: the path is wrong, or the {self.folder} was "
                f"cut short. {self.wanted}"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {one_line(error)}. {self.again}") from None
        if key is not None:
            key.check(path, text)
        return self.read(kind, text, str(folder))

    def read(self, kind: type[D], text: bytes, where: str) -> D:
        """Parse a document.

        Args:
            where: its folder.
        Raises:
            ArtifactError: it is none, of another version, or damaged.
        """
        try:
            body = self._body(text, where)
            document: D = read_record(kind, body)
            document.check(where)
        except (ValueError, RecursionError) as error:
            what = str(error) if isinstance(error, Misfit) else f"{error!r}."
            raise ArtifactError(
                f"{where}/{self.file} cannot be read: {what} {self.again}"
            ) from error
        return document

    def _body(self, text: bytes, where: str) -> dict[str, Any]:
        """The fields without the head, when the text is what was written."""
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("it is no object of JSON")
        if body.get("format") != self.format:
            raise ArtifactError(
                f"{where}/{self.file} is no {self.format} but says format={body.get('format')!r}. "
                f"{self.wanted}"
            )
        if body.get("version") not in self.versions:
            raise ArtifactError(
                f"{where} has {self.folder} version {body.get('version')!r}; this rayrec reads "
                f"versions {self.versions[0]} to {self.versions[-1]}. {self.other_version}"
            )
        sha256 = body.pop("sha256", None)
        if sha256 != fingerprint(body):
            raise ArtifactError(
                f"{where}/{self.file} is damaged: its sha256 is not the one that it says. "
                f"{self.again}"
            )
        del body["format"], body["version"]
        return body | {"sha256": sha256}


def fingerprint(body: Mapping[str, Any]) -> str:
    """The sha256 of JSON data, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
