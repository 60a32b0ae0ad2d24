"""`forget`: takes the rows of keys out of all that a folder holds, and leaves a receipt.

Every file of a table that has any of the keys is read, and no other. What holds one of them is
written anew beside its place and read once more, to see that none is left; then new and old folders
change places (`rayrec.erasure.staging`). So a reader finds each checkpoint, artifact and
publication as it was or as it will be.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from os.path import samefile
from pathlib import Path

from rayrec.checkpoint import Parent
from rayrec.driver.run_folder import held
from rayrec.erasure.artifacts import StoredArtifact
from rayrec.erasure.checkpoints import StoredCheckpoint
from rayrec.erasure.folders import RECEIPT, StoredFolders
from rayrec.erasure.keys import KeyFile
from rayrec.erasure.receipt import ChangedFile, ForgottenTable, Receipt
from rayrec.erasure.staging import Found, Move, Staging
from rayrec.erasure.windows import StoredWindows
from rayrec.errors import ConfigError, RayrecError, SaveError
from rayrec.fields.writing import record_of
from rayrec.serve.artifact import local_folder
from rayrec.serve.signing import SigningKey
from rayrec.storage import one_line
from rayrec.version import VERSION


def forget(
    folder: str | os.PathLike[str],
    keys: str | os.PathLike[str],
    *,
    signing_key: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Receipt, str]:
    """Take the rows of keys out of all checkpoints, artifacts and publications below a folder.

    Args:
        folder: local folder of a run, or one that holds artifacts or publications.
        keys: CSV, Parquet or Arrow file of the keys, with a column for each feature.
        signing_key: place of the key by which artifacts and publications are signed.
        say: receives a line where an earlier erasure was finished first.
    Returns:
        the receipt, and the path of its file.
    Raises:
        ConfigError: a run has the folder, or an export writes to it, or it holds nothing to forget
            in; or a column of the keys names nothing; or something is signed, and there is no key.
        InputError: the keys cannot be read, or one cannot be an id.
        CheckpointError, ArtifactError: something cannot be read, or is damaged.
        SaveError: the file system refuses.
    """
    root = local_folder("the folder to forget in", folder)
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; name the folder of a run.")
    if root.resolve() in Path(keys).resolve().parents:
        raise ConfigError(f"{keys} lies in {root}, where its keys would stay; keep it elsewhere.")
    key_file, key = KeyFile(os.fspath(keys)), SigningKey.read(signing_key)
    with held(str(root), say, erases=True):
        staging = Staging(root)
        earlier = staging.finish_last()
        if earlier is not None:
            say(f"finished what was cut short, with the receipt {root / earlier}")
        return _Erasure(root, key_file, key, staging).run()


class _Erasure:
    """An erasure in a folder that is held."""

    def __init__(self, root: Path, keys: KeyFile, key: SigningKey | None, staging: Staging) -> None:
        self._root, self._keys, self._key, self._staging = root, keys, key, staging
        self._folders = StoredFolders(root)
        self._wanted = keys.ids(self._folders.schemas(), self._folders.tables())
        self._found = Found()
        self._new, self._moves, self._files = list[str](), list[Move](), list[ChangedFile]()

    def run(self) -> tuple[Receipt, str]:
        """Write new folders, check them, and put them into their places."""
        try:
            self._stage_checkpoints()
            self._stage_artifacts()
            self._stage_chains()
            self._stage_windows()
            receipt = self._receipt(self._left())
            self._folders.check_exports(StoredFolders(self._root))
        except BaseException as error:
            self._staging.clear()
            if isinstance(error, OSError):
                raise SaveError(f"cannot write below {self._root}: {one_line(error)}.") from error
            raise
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(receipt.time))
        name = f"{RECEIPT}{stamp}-{receipt.salt[:6]}.json"
        self._staging.finish(self._moves, record_of(receipt), name)
        return receipt, str(self._root / name)

    def _stage_checkpoints(self) -> None:
        """Write the checkpoints anew that hold an id, and the increments on them."""
        renamed, away, back = dict[str, str](), list[Move](), list[Move]()
        for path, checkpoint in self._folders.checkpoints.items():
            found = checkpoint.find(self._wanted)
            self._found.include(found)
            parent = checkpoint.manifest.parent
            if parent is not None:
                parent = Parent(parent.name, renamed.get(parent.sha256, parent.sha256))
            if found.rows or parent != checkpoint.manifest.parent:
                out = self._new_folder(path)
                renamed[checkpoint.sha256] = checkpoint.rewrite(out, self._wanted, found, parent)
                self._note(path, found)
                away.insert(0, self._staging.removed(path))
                back.append(self._staging.added(path))
        # children leave first and come back last, so that each chain in its place is whole
        self._moves += away + back

    def _stage_artifacts(self) -> None:
        """Write the artifacts anew that hold an id."""
        for path, artifact in self._folders.artifacts.items():
            found = artifact.find(self._wanted)
            self._found.include(found)
            if found.rows:
                out = self._new_folder(path)
                artifact.rewrite(out, self._wanted, key=artifact.key_of(self._key))
                self._note(path, found)
                self._moves += [self._staging.removed(path), self._staging.added(path)]

    def _stage_chains(self) -> None:
        """Write a new base for each chain that holds an id, and remove all before it."""
        for path, chain in self._folders.chains.items():
            found = chain.find(self._wanted)
            for one in found.values():
                self._found.include(one)
            if not any(one.rows for one in found.values()):
                continue
            # servers go on to the new base before those that it takes the places of are gone
            base = (Path(path) / chain.next_name).as_posix()
            chain.write_base(self._new_folder(base), self._wanted, self._key)
            self._note(base, Found())
            self._moves.append(self._staging.added(base))
            for name, one in found.items():
                place = (Path(path) / name).as_posix()
                self._note(place, one)
                self._moves.append(self._staging.removed(place))

    def _stage_windows(self) -> None:
        """Write the folders of windows anew that hold a key, or notes of refused rows."""
        schemas = self._folders.window_schemas()
        unnamed = self._keys.unnamed(schemas)
        if self._folders.windows and unnamed is not None:
            raise ConfigError(
                f"{self._root} holds windows of a stream, and no checkpoint says which of their "
                f"columns have the keys of {unnamed!r}. Resume the run until it saves one that "
                "does, or begin a new run and delete this one."
            )
        for path, windows in self._folders.windows.items():
            found = windows.find(self._keys, schemas)
            if found or windows.has_notes():
                windows.rewrite(self._new_folder(path), self._keys, schemas, found)
                self._note(path, Found(rows=found))
                self._moves += [self._staging.removed(path), self._staging.added(path)]

    def _new_folder(self, path: str) -> Path:
        self._new.append(path)
        return self._staging.new(path)

    def _note(self, path: str, found: Found) -> None:
        """Note the files of a folder that change, for the receipt."""
        old, new = self._root / path, self._staging.new(path)
        for name in sorted({*_files_of(old), *_files_of(new)}):
            if (old / name).exists() and (new / name).exists():
                if samefile(old / name, new / name):
                    continue  # it is linked
                shutil.copymode(old / name, new / name)
            was, now = _sha256(old / name), _sha256(new / name)
            if was != now:
                self._files.append(ChangedFile(f"{path}/{name}", was, now, found.rows.get(name, 0)))

    def _left(self) -> Found:
        """Read all new folders, and return what they hold of the ids, which is nothing.

        Raises:
            RayrecError: they hold something.
        """
        left = Found()
        for path in self._new:
            if path in self._folders.windows:
                windows = StoredWindows(self._staging.new(path))
                left.rows |= windows.find(self._keys, self._folders.window_schemas())
                continue
            kind = StoredCheckpoint if path in self._folders.checkpoints else StoredArtifact
            left.include(kind(self._staging.new(path)).find(self._wanted))
        if left.rows:
            raise RayrecError(
                f"{next(iter(left.rows))} still holds rows of keys after it was written anew, so "
                "nothing was changed. This is a defect of rayrec."
            )
        return left

    def _receipt(self, left: Found) -> Receipt:
        salt, tables = secrets.token_hex(16), []
        for name, wanted in self._wanted.items():
            found, now = (len(one.ids.get(name, ())) for one in (self._found, left))
            shared = found if wanted.shared else 0
            tables.append(ForgottenTable(name, len(wanted.ids), found, now, shared))
        return Receipt(
            rayrec=VERSION,
            time=time.time(),
            folder=str(self._root),
            salt=salt,
            keys=self._keys.hashes(salt),
            rows_scanned=self._found.rows_scanned,
            tables=tuple(tables),
            files=tuple(self._files),
            not_read=tuple(self._folders.others),
        )


def _files_of(folder: Path) -> list[str]:
    """Return the paths of all files below a folder; none where it is not there."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return [file.relative_to(folder).as_posix() for file in files]


def _sha256(file: Path) -> str | None:
    if not file.exists():
        return None
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
