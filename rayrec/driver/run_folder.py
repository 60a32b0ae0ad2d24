"""The folder of a run while a driver writes to it: writable, and owned by one driver at a time.

`held` proves that the folder can be written to, before a rank is started for it, and takes its
lock: a file that names the owner and is written anew every `BEAT_S` seconds. A second driver is
refused while the owner lives. An owner that is gone does not hold the folder: on the same machine a
dead process is seen at once, from elsewhere by a beat older than `STALE_S`. The token file that
`held` leaves tells ranks on other hosts whether they see the same folder, and which of their worlds
is the newest. Works on local disks and on every file system of pyarrow.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from rayrec.errors import ConfigError, RayrecError
from rayrec.fields.reading import read_record
from rayrec.fields.writing import record_of
from rayrec.machine.folder_lock import folder_lock
from rayrec.storage import one_line, resolve
from rayrec.train.world_mark import WorldMark

LOCK = "lock.json"
# rows of ids are being taken out of a folder that has this file, or were until a process was killed
ERASURE, JOURNAL = ".erasure", "journal.json"
TOKEN = ".rayrec-token-"
BEAT_S = 10.0
STALE_S = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """A driver that holds a run folder.

    Attributes:
        token: a random name of this hold.
        machine: identifies the kernel and the process namespace.
        started: start of its process, in ticks since boot.
        beat: time of its last heartbeat, in seconds of its wall clock.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: int
    beat: float

    @classmethod
    def here(cls, token: str) -> Owner:
        """Return this process as an owner, with a heartbeat of now."""
        pid = os.getpid()
        return cls(token, socket.gethostname(), _machine(), pid, _started(pid) or 0, time.time())

    def is_gone(self) -> bool:
        """Return whether the process ended, or has not been heard of for `STALE_S` seconds."""
        # Numbers of processes are used again; the start tells two processes of one number apart.
        if self.machine == _machine():
            return _started(self.pid) != self.started
        return time.time() - self.beat > STALE_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunFolder:
    """Run folder that this process has locked with `held`.

    Args:
        erases: True where rows are to be taken out of the folder, and no run is to start.
    Attributes:
        path: absolute folder or URI.
        token: name of a file in the folder that ranks look for.
    """

    def __init__(self, path: str, erases: bool = False) -> None:
        self.path, self._erases = path, erases
        self._filesystem, self._root = resolve(path)
        self._id = uuid.uuid4().hex
        self.token = f"{TOKEN}{self._id}"
        self._made, self._worlds = False, 0
        self._end = threading.Event()
        self._lost: Owner | None = None
        self._thread = threading.Thread(target=self._beat, name="rayrec-lock", daemon=True)

    def check(self) -> None:
        """Check that this driver still holds the folder.

        Raises:
            RayrecError: another driver took it over, since this one seemed to be gone.
        """
        if self._lost is not None:
            raise RayrecError(
                f"{self.path} was taken over by {self._lost}, because this driver had not been "
                f"heard of for {STALE_S:.0f} s. End one of the two, and continue from the newest "
                "checkpoint."
            )

    def open(self, say: Callable[[str], None]) -> None:
        """Write the token, take the lock, and keep it.

        Raises:
            ConfigError: the folder cannot be written to, or another driver holds it, or an erasure
                in it was cut short.
        """
        try:
            self._open(say)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(
                f"cannot write to the run's folder {self.path}: {one_line(error)}. Name a folder "
                "or a URI that can be written to, with storage_path and name."
            ) from None
        self._thread.start()

    def _open(self, say: Callable[[str], None]) -> None:
        journal = self._filesystem.get_file_info(f"{self._root}/{ERASURE}/{JOURNAL}")
        if journal.type == fs.FileType.File and not self._erases:
            raise ConfigError(
                f"an erasure in {self.path} was cut short. Run rayrec forget on it again, which "
                "finishes it."
            )
        # A folder that this driver made is removed again if nothing is kept in it.
        self._made = self._filesystem.get_file_info(self._root).type == fs.FileType.NotFound
        self._filesystem.create_dir(self._root, recursive=True)
        self._write(self.token, b"0")
        with self._alone() as is_alone:
            if not is_alone:
                raise ConfigError(
                    f"{self.path} is being taken by another driver at this moment. Wait for that "
                    "run or end it, or give this run another name or storage_path."
                )
            self._take(say)
        # Two drivers may both have found no owner. The one whose name stands in the lock has won.
        winner = self._owner()
        if winner is not None and winner.token != self._id:
            raise ConfigError(f"{self.path} is in use by {winner}, which started at the same time.")

    def _take(self, say: Callable[[str], None]) -> None:
        """Take the lock where nobody has it, or one that is gone.

        Raises:
            ConfigError: another driver has it.
        """
        owner = self._owner()
        if owner is not None and not owner.is_gone():
            remedy = (
                "Wait for that run or end it, or give this run another name or storage_path."
                if not self._erases
                else "End it by SIGTERM, so that it saves; forget; then resume it."
            )
            raise ConfigError(
                f"{self.path} is in use by {owner}, last heard of {time.time() - owner.beat:.0f} s "
                f"ago. {remedy}"
            )
        if owner is not None:
            say(f"took over {self.path} from {owner}, which is gone")
        self._write(LOCK, _to_json(Owner.here(self._id)), new=owner is None)
        if owner is not None:
            with suppress(OSError, pa.ArrowException):
                self._filesystem.delete_file(f"{self._root}/{TOKEN}{owner.token}")

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Yield False where another process of this disk looks for the owner at the same time."""
        # two that find the same owner gone would both take its place
        with ExitStack() as stack:
            is_alone = True
            if isinstance(self._filesystem, fs.LocalFileSystem):
                with suppress(OSError):
                    is_alone = stack.enter_context(folder_lock(self._root))
            yield is_alone

    def next_world(self) -> WorldMark:
        """Mark the begin of another world of ranks, after which earlier ones save no more."""
        self._worlds += 1
        # a full disk must not end the run here
        with suppress(OSError, pa.ArrowException):
            self._write(self.token, str(self._worlds).encode())
        return WorldMark(f"{self.path}/{self.token}", self._worlds)

    def close(self) -> None:
        """Give the folder back: no token, no lock, and no folder that was made for nothing."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S)
        with suppress(OSError, pa.ArrowException):
            self._filesystem.delete_file(f"{self._root}/{self.token}")
        with suppress(OSError, pa.ArrowException):
            owner = self._owner()
            if owner is not None and owner.token == self._id:
                self._filesystem.delete_file(f"{self._root}/{LOCK}")
        if self._made and isinstance(self._filesystem, fs.LocalFileSystem):
            with suppress(OSError):
                os.rmdir(self._root)  # only an empty folder goes

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            owner = self._owner()
            if owner is not None and owner.token != self._id:
                self._lost = owner
                return
            # a full disk must not end the run here
            with suppress(OSError, pa.ArrowException):
                self._write(LOCK, _to_json(Owner.here(self._id)))

    def _owner(self) -> Owner | None:
        """Return the owner that the lock file names, or None if no lock can be read."""
        try:
            with self._filesystem.open_input_stream(f"{self._root}/{LOCK}") as file:
                owner: Owner = read_record(Owner, json.loads(file.read()))
                return owner
        except (OSError, ValueError):
            return None

    def _write(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write a small file so that it appears whole; with `new`, one that stands is left."""
        target = f"{self._root}/{name}"
        local = isinstance(self._filesystem, fs.LocalFileSystem)
        # An object store shows a file when it is closed, so it needs no second name.
        partial = f"{self._root}/.{name}-{self._id}" if local else target
        try:
            with self._filesystem.open_output_stream(partial, compression=None) as stream:
                stream.write(content)
            if new and local:
                try:
                    # fails where another driver's lock stands: one of two wins
                    os.link(partial, target)
                except FileExistsError:
                    # the file there may be no lock
                    new = self._owner() is not None
            if local and not new:
                os.replace(partial, target)
        finally:
            # left by a disk that is full, or linked
            if local:
                with suppress(OSError):
                    os.unlink(partial)


@contextmanager
def held(
    path: str | None, say: Callable[[str], None], erases: bool = False
) -> Iterator[RunFolder | None]:
    """Hold the folder of a run inside the block; does nothing without one.

    Args:
        path: absolute folder or URI, made if need be.
        say: receives a line when the folder was taken over from an owner that is gone.
        erases: True to take rows out of the folder, and start no run in it.
    Raises:
        ConfigError: the folder cannot be written to, or another driver holds it.
    """
    if path is None:
        yield None
        return
    folder = RunFolder(path, erases)
    try:
        folder.open(say)
        yield folder
    finally:
        folder.close()


def _to_json(owner: Owner) -> bytes:
    return json.dumps(record_of(owner)).encode()


def _machine() -> str:
    """Identify the kernel and the namespace of process ids, which containers do not share."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    # equals no other machine, so that only the beat tells
    return f"unknown/{uuid.uuid4().hex}"


def _started(pid: int) -> int | None:
    """Return the start of a process, in ticks since boot; None when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A process that has ended and was not waited for (Z, X) is gone. Field 22 is the start.
    return None if stat[0] in "ZX" else int(stat[19])
