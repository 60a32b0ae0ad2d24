"""The rows of ids in a chain of publications: found, and left out of a new base.

What was published is never changed under its name, since servers know it by its hash. A new base
with all that the chain has come to follows its newest publication, and servers go on to it as to
any other; then all publications before it are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rayrec.erasure.artifacts import StoredArtifact, held_in, key_for
from rayrec.erasure.keys import StoredIds
from rayrec.erasure.staging import Found
from rayrec.errors import ArtifactError
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.publication import BASE, PUBLICATION, ChainPlace, Publication
from rayrec.serve.chain.row_files import ChangedRows, read_rows
from rayrec.serve.signing import SigningKey
from rayrec.serve.stored import read_stored


class StoredChain:
    """A folder of publications.

    Attributes:
        folder: the folder.
        publications: all of them, ascending.
        base: artifact of the newest base.
    Raises:
        ArtifactError: a publication cannot be read, or no base is there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._chain = folder, ChainFolder(folder)
        self._chain.clear()
        self.publications = [self._chain.read(place) for place in self._chain.places()]
        bases = [one for one in self.publications if one.kind == BASE]
        if not bases:
            raise ArtifactError(f"{folder} holds deltas and no base; delete them.")
        self.base = StoredArtifact(folder / bases[-1].name)
        self._newest = self.publications[self.publications.index(bases[-1]) :]

    def find(self, wanted: Mapping[str, StoredIds]) -> dict[str, Found]:
        """Read the rows of the tables of ids, and return what each publication holds of them.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        found, base = dict[str, Found](), self.base
        for publication in self.publications:
            if publication.kind == BASE:
                base = self._base(publication)
                found[publication.name] = base.find(wanted)
                continue
            found[publication.name] = own = Found()
            for path, change in self._changes(publication, base):
                table = base.manifest.tables[change.number]
                if table.name in wanted:
                    ids, values = wanted[table.name].ids, change.packed.numpy()
                    held = held_in(table.packed, change.rows, values, change.keys, ids)
                    own.add(path, table.name, len(change.rows), held)
        return found

    @property
    def next_name(self) -> str:
        """Name of the next base."""
        return ChainPlace(self.publications[-1].seq + 1, BASE).name

    def write_base(
        self, out: Path, wanted: Mapping[str, StoredIds], key: SigningKey | None
    ) -> None:
        """Write the next base, without the rows of ids.

        Args:
            out: new folder.
            key: key to sign it with where its parent is signed.
        Raises:
            ArtifactError: a file is missing or damaged.
            ConfigError: the chain is signed, and there is no key.
            OSError: the file system refuses.
        """
        head = self.publications[-1]
        key = key_for(self.folder / head.name, PUBLICATION, key)
        deltas = self._newest[1:]
        changes = [change for one in deltas for _, change in self._changes(one, self.base)]
        latest = None
        if head.dense is not None:
            latest = head.to_step, read_stored(self.folder / head.name, head.dense)
        manifest = self.base.rewrite(out, wanted, changes, latest)
        publication = Publication(
            kind=BASE,
            run=head.run,
            seq=head.seq + 1,
            parent=head.sha256,
            artifact=manifest.sha256,
            from_step=0,
            to_step=head.to_step,
            time=head.time,
            dense=None,
        ).sealed()
        text = publication.to_bytes()
        if key is not None:
            key.sign(out / PUBLICATION, text)
        (out / PUBLICATION).write_bytes(text)

    def _base(self, publication: Publication) -> StoredArtifact:
        artifact = StoredArtifact(self.folder / publication.name)
        if artifact.manifest.sha256 != publication.artifact:
            raise ArtifactError(f"{artifact.folder} holds another artifact than was published.")
        return artifact

    def _changes(self, delta: Publication, base: StoredArtifact) -> list[tuple[str, ChangedRows]]:
        """Return the rows of each file of a delta, with its path.

        Args:
            base: what it adds to, which says how its rows are packed.
        """
        numbers = {table.name: number for number, table in enumerate(base.manifest.tables)}
        changes = list[tuple[str, ChangedRows]]()
        for changed in delta.tables:
            number = numbers[changed.name]
            packed = base.manifest.tables[number].packed
            read = read_rows(self.folder / delta.name, changed, packed, number)
            changes += zip([file.path for file in changed.files], read, strict=True)
        return changes
