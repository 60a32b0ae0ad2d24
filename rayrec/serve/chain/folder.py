"""`ChainFolder`: the folder that training publishes into and servers follow.

A publication is written into a hidden folder beside its place, and gets its name when it is
complete. A folder of that name is never written twice, so two runs that publish into one folder
find each other out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rayrec.errors import ArtifactError, SaveError
from rayrec.serve.artifact import local_folder
from rayrec.serve.chain.publication import (
    BASE,
    DELTA,
    PUBLICATION,
    ChainPlace,
    Publication,
    place_of,
)
from rayrec.serve.signing import SigningKey
from rayrec.storage import one_line, sync

PUBLISHED = "published"  # below the folder of a run
_HIDDEN = ".rayrec-"
T = TypeVar("T")


class ChainFolder:
    """Folder of publications.

    Args:
        path: local folder; it need not exist yet.
        key: key that publications have to be signed with to be read; None asks for none.
        check: called before anything gets or loses its place there; its error is raised.
    Raises:
        ConfigError: the path is no local one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        key: SigningKey | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.path = local_folder("the folder of publications", path)
        self._key, self._check = key, check

    @classmethod
    def of_run(cls, path: str | os.PathLike[str], key: SigningKey | None = None) -> ChainFolder:
        """Return the folder of publications at `path`, or below it where it is a run's folder."""
        own = cls(path, key)
        below = own.path / PUBLISHED
        return cls(below, key) if not own.places() and below.is_dir() else own

    def places(self) -> list[ChainPlace]:
        """Return the places of all complete publications, ascending."""
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {one_line(error)}.") from None
        return sorted(place for name in names if (place := place_of(name)) is not None)

    def newest(self, read: Callable[[ChainPlace], T], kinds: Sequence[str] = (BASE, DELTA)) -> T:
        """Return the result of `read` for the newest publication that can be read.

        Raises:
            ArtifactError: the error of the newest one where none can be read; or there is none.
        """
        while True:
            trouble: ArtifactError | None = None
            places = [place for place in self.places() if place.kind in kinds]
            for place in reversed(places):
                try:
                    return read(place)
                except ArtifactError as error:
                    # without its frames, which hold what was read
                    trouble = trouble or ArtifactError(str(error))
            # what was pruned while it was read has a newer one in its place
            if {place for place in self.places() if place.kind in kinds} <= set(places):
                break
        raise trouble or ArtifactError(
            f"{self.path} holds no base to begin with; name the folder of a run that publishes, "
            "after its first publication."
        )

    def folder(self, place: ChainPlace) -> Path:
        """Return the path of a publication."""
        return self.path / place.name

    def read(self, place: ChainPlace) -> Publication:
        """Read the record of a publication.

        Raises:
            ArtifactError: the publication is missing, damaged or not signed, or lies in the place
                of another one.
        """
        folder = self.folder(place)
        publication = Publication.read_file(folder, self._key)
        if publication.place != place:
            raise ArtifactError(f"{folder} holds {publication.name}. Copy it to its own place.")
        return publication

    def head(self) -> Publication | None:
        """Return the newest publication, or None.

        Raises:
            ArtifactError: it is damaged.
        """
        places = self.places()
        return self.read(places[-1]) if places else None

    def hidden(self, place: ChainPlace, own: str = "") -> Path:
        """Return the hidden path where a publication is written before it gets its name.

        Args:
            own: a random word, where another run may write to the same place at the same time.
        """
        return self.path / f"{_HIDDEN}{place.name}{own}"

    def finish(self, publication: Publication, hidden: Path, key: SigningKey | None = None) -> None:
        """Give a publication that was written its last file and its name.

        Args:
            hidden: where it was written.
            key: key to sign the publication with; None signs none.
        Raises:
            SaveError: the file system refuses, or somebody else has published in its place.
        """
        target = self.folder(publication.place)
        try:
            publication.write(hidden, key)
            self._check_alone(publication)
            os.rename(hidden, target)
            sync(self.path)
        except OSError as error:
            raise SaveError(f"cannot publish {target}: {one_line(error)}.") from error

    def _check_alone(self, publication: Publication) -> None:
        """Check that no other run, or world of it, has published since the parent was read."""
        if self._check is not None:
            self._check()
        newest = ""
        with suppress(ArtifactError):  # a damaged one is not the parent that was read before
            head = self.head()
            newest = "" if head is None else head.sha256
        if newest != publication.parent or publication.seq <= max(
            (seq for seq, _ in self.places()), default=0
        ):
            raise SaveError(
                f"another run has published into {self.path} since {publication.name} was begun; "
                "give every run a folder of its own."
            )

    def clear(self) -> None:
        """Remove the remains of unfinished publications."""
        if self._check is not None:
            self._check()
        for left in self.path.glob(f"{_HIDDEN}*"):
            shutil.rmtree(left, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Delete the oldest publications, so that so many bases and what follows them are left.

        Raises:
            SaveError: the file system refuses to delete one; those before it are gone.
        """
        places = self.places()
        bases = [place for place in places if place.kind == BASE]
        if len(bases) <= keep:
            return
        # the oldest first, and of each the file that makes it a publication first
        for place in places:
            if place.seq < bases[-keep].seq:
                folder = self.folder(place)
                try:
                    (folder / PUBLICATION).unlink(missing_ok=True)
                except OSError as error:
                    raise SaveError(
                        f"cannot delete the old publication {folder}: {one_line(error)}. Let it be "
                        "deleted, or keep more of them (num_to_keep)."
                    ) from error
                shutil.rmtree(folder, ignore_errors=True)
