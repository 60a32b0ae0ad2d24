"""`Follower`: goes from one published version to the next, and never between two.

A look reads what the folder says, lets `judge` decide, checks every byte of what comes next, and
only then changes tables. What is missing is waited for; where it does not come, the newest base
takes its place. Of what is forked or of another model nothing is taken: the follower stays at its
version and says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve.artifact import Artifact, read_artifact
from rayrec.serve.chain.copies import TableCopies
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.publication import BASE, DELTA, ChainPlace, Publication
from rayrec.serve.chain.row_files import ChangedRows, read_rows
from rayrec.serve.chain.version_policy import Position, Verdict, alike, judge
from rayrec.serve.dense_file import loaded_dense
from rayrec.serve.manifest import Manifest
from rayrec.serve.signing import SigningKey
from rayrec.serve.stored import read_stored
from rayrec.storage import one_line


@dataclass(frozen=True, slots=True)
class Version:
    """Version of the weights, in the form that one process sends to another.

    Attributes:
        name: the step, and the first digits of the publication's sha256.
        step: global training step.
        time: seconds since 1970 when the weights were taken.
        event_time, ingest_time: of the newest rows of a stream; see `Publication`.
        copy: number of the copy that holds its tables.
        powers: power by which the rows of each table are packed.
        dense: bytes of the dense part.
    """

    name: str
    step: int
    time: float
    copy: int
    powers: tuple[int, ...]
    dense: bytes
    event_time: int | None = None
    ingest_time: float | None = None

    def dense_tensors(self) -> dict[str, Tensor]:
        """Return the dense parameters and buffers, by their names in the model."""
        return loaded_dense(self.dense, self.name)


class Follower:
    """Follows the publications in a folder.

    Args:
        path, strict, trusted, signing_key: the arguments of `Predictor.follow`.
    Attributes:
        free: called with the number of a copy before it is written; returns when nobody reads it.
        artifact: first base; its schema, recipe and program hold for all versions.
        copies: copies of the tables.
        version: version that was applied last.
        verdict: CURRENT, or why the newest publication was not applied: GAP, FORK, DAMAGED, OTHER.
        trouble: explanation of the verdict in a line; "" while current.
    Raises:
        ConfigError, ArtifactError: the errors of `Predictor.follow`; or not strict, and a table is
            dynamic.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        trusted: bool = True,
        signing_key: str | None = None,
    ) -> None:
        self.folder = ChainFolder.of_run(path, SigningKey.read(signing_key))
        self.free: Callable[[int], None] = lambda copy: None
        self._trusted = trusted
        self.verdict, self.trouble = Verdict.CURRENT, ""

        def base(place: ChainPlace) -> tuple[Publication, Artifact]:
            publication = self.folder.read(place)
            return publication, self._opened(publication, self._manifest(publication))

        publication, opened = self.folder.newest(base, [BASE])
        if not strict and (dynamic := [t.name for t in opened.packed.tables if t.has_ids]):
            raise ConfigError(
                f"table {dynamic[0]!r} is dynamic, and a row may belong to another id in the next "
                "version: rows and ids change together in a second copy. Leave strict=False out."
            )
        self.copies = TableCopies(opened.packed, 2 if strict else 1)
        # the copies are all that is kept of its tables
        self.artifact = replace(opened, packed=self.copies.tables(0), memory=None)
        self.position = Position.at(publication, None)
        self._powers = [table.power for table in self.artifact.packed.tables]
        dense = opened.content[opened.manifest.dense.path]
        self._shapes = _shapes(opened.dense())
        self.version = self._version(publication, dense)

    def look(self) -> Version | None:
        """Apply the next publication, if there is one.

        Returns:
            the version that the tables have now; None where nothing was applied.
        """
        try:
            version = self._next()
        except ArtifactError as error:
            self.verdict = error.verdict if isinstance(error, _Refused) else Verdict.DAMAGED
            self.trouble = str(error)
            return None
        self.verdict, self.trouble = Verdict.CURRENT, ""
        return version

    def _next(self) -> Version | None:
        """Apply the next publication, or the newest whole base where it is missing or damaged."""
        places = self.folder.places()
        if not places:
            # a base is there from the first publication on
            raise ArtifactError(f"{self.folder.path} holds no publication any more")
        later = [place for place in places if place.seq > self.position.seq]
        if not later:
            self._read(places[-1])
            return None
        trouble: ArtifactError | None = None
        tried = [place for place in reversed(later) if place.kind == BASE]
        if later[0].seq == self.position.seq + 1:
            # a base that comes next is among the others, too
            tried = list(dict.fromkeys([later[0], *tried]))
        else:
            wanted = ChainPlace(self.position.seq + 1, DELTA)
            gap = f"{wanted.name} is missing, and {later[0].name} is there"
            trouble = _Refused(Verdict.GAP, gap)
        for place in tried:
            try:
                return self._apply(place)
            except _Refused:
                raise
            except ArtifactError as error:
                # without its frames, which hold the tables that were read
                trouble = trouble or ArtifactError(str(error))
        assert trouble is not None, "the next one is missing, or cannot be read"
        raise trouble

    def _read(self, place: ChainPlace) -> Publication:
        """Read the record of a publication that was applied, or may be."""
        publication = self.folder.read(place)
        if judge(self.position, publication) is Verdict.FORK:
            raise _Refused(
                Verdict.FORK,
                f"{publication.name} of run {publication.run} does not follow what was applied, "
                f"number {self.position.seq} of run {self.position.run}",
            )
        return publication

    def _apply(self, place: ChainPlace) -> Version:
        """Apply one publication, if it comes next and is whole."""
        try:
            publication = self._read(place)
            version = self._based(publication) if place.kind == BASE else self._changed(publication)
        except ArtifactError:
            raise
        # a whole publication of somebody else's may contradict itself in any way, and whoever
        # follows goes on
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            raise ArtifactError(f"{place.name} contradicts itself ({why})") from error
        self.position, self.version = Position.at(publication, self.position), version
        return version

    def _changed(self, publication: Publication) -> Version:
        """Apply a delta, every byte of which is checked before the first row is written."""
        folder = self.folder.folder(publication.place)
        tables = self.artifact.packed.tables
        numbers = {table.name: number for number, table in enumerate(tables)}
        changes = list[ChangedRows]()
        for changed in publication.tables:
            if changed.name not in numbers:
                raise ArtifactError(f"{folder} changes {changed.name!r}, which the base lacks.")
            number = numbers[changed.name]
            if changed.power != self._powers[number]:
                raise ArtifactError(
                    f"{folder} packs table {changed.name!r} by another power than the base; it "
                    "needs a base of its own. Publish with this rayrec."
                )
            changes += read_rows(folder, changed, tables[number], number)
        assert publication.dense is not None, "a delta has a dense part"
        dense = read_stored(folder, publication.dense)
        self._check_dense(dense, str(folder / publication.dense.path))
        self.free(self.copies.resting)
        self.copies.apply(changes)
        return self._version(publication, dense)

    def _based(self, publication: Publication) -> Version:
        """Apply all rows of a base."""
        # before its tables are read, which would be done again at each look
        manifest = self._manifest(publication)
        if not alike(self.artifact.manifest, manifest):
            other = f"{publication.name} has other tables, types, features or outputs; start anew"
            raise _Refused(Verdict.OTHER, other)
        artifact = self._opened(publication, manifest)
        path = manifest.dense.path
        dense = artifact.content[path]
        self._check_dense(dense, str(artifact.folder / path))
        self.free(self.copies.resting)
        self.copies.load(artifact.packed)
        self._powers = [table.power for table in artifact.packed.tables]
        return self._version(publication, dense)

    def _opened(self, publication: Publication, manifest: Manifest) -> Artifact:
        """Open the artifact of a base, with all its bytes checked."""
        folder = self.folder.folder(publication.place)
        return read_artifact(folder, manifest, trusted=self._trusted)

    def _manifest(self, publication: Publication) -> Manifest:
        folder = self.folder.folder(publication.place)
        manifest = Manifest.read_file(folder)
        if manifest.sha256 != publication.artifact:
            raise ArtifactError(f"{folder} holds another artifact than it was published with.")
        return manifest

    def _check_dense(self, dense: bytes, where: str) -> None:
        """Check that a dense part is of this model, before any row is written."""
        shapes = _shapes(loaded_dense(dense, where, trusted=self._trusted))
        if shapes != self._shapes:
            name = sorted(map(str, shapes.items() ^ self._shapes.items()))[0]
            raise ArtifactError(f"{where} has other parameters than the base, such as {name}.")

    def _version(self, publication: Publication, dense: bytes) -> Version:
        return Version(
            name=publication.version,
            step=publication.to_step,
            time=publication.time,
            copy=self.copies.active,
            powers=tuple(self._powers),
            dense=dense,
            event_time=publication.event_time,
            ingest_time=publication.ingest_time,
        )


class _Refused(ArtifactError):
    """Reason why nothing is applied, other than damage."""

    def __init__(self, verdict: Verdict, trouble: str) -> None:
        super().__init__(trouble)
        self.verdict = verdict


def _shapes(dense: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in dense.items()}
