"""Memory of a rank that outlives its process: a keeper process of the host holds it (Linux only).

The keeper (`memory_keeper`) starts with the first rank that needs it. Its address follows from a
name that the driver draws for each run and plan, so that a process which takes the place of a
killed one finds the memory of that one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from rayrec.comm.pages import map_file
from rayrec.comm.shared_segment import unsupported
from rayrec.errors import CommError, ConfigError
from rayrec.shards.named_memory import Memory

_SCRIPT = Path(__file__).with_name("memory_keeper.py")
_START_S = 30.0
_ANSWER_S = 30.0
_AGAIN_S = 0.02
_connected: dict[str, socket.socket] = {}


class KeptMemory(Memory):
    """The memory of one rank at the keeper of its host.

    The process stays connected until it ends, which tells the keeper that its rank lives.

    Args:
        name: the key of the memory, which the driver draws for each run and plan.
        rank: the rank that owns the pieces.
    Raises:
        ConfigError: this machine cannot keep memory.
        CommError: the keeper cannot be started.
    """

    def __init__(self, name: str, rank: int) -> None:
        why = unsupported()
        if why is not None:
            raise ConfigError(
                f"rank {rank}: FailureConfig(sync_every_n_steps=...) {why}; leave it out."
            )
        end_keepers(but=name)
        if name not in _connected or not _answers(_connected[name]):
            _connected[name] = _connect(name, rank)
        self._keeper, self._rank = _connected[name], rank

    def take(self, name: str, size: int) -> Tensor:
        """Map a piece that the keeper holds, or that it makes of zeros.

        Raises:
            CommError: the keeper is gone, or has no more memory.
        """
        file = self.file(name, size)
        try:
            return map_file(file, size)
        except OSError as error:
            raise self._gone(error) from error
        finally:
            os.close(file)

    def file(self, name: str, size: int) -> int:
        """Ask the keeper for the fd of a piece; the caller closes it."""
        try:
            self._ask("take", name, size)
            said, files, _, _ = socket.recv_fds(self._keeper, 1, 1)
            if said != b"\0":
                raise OSError(said[0] if said else 104, "it gave no memory")
        except OSError as error:
            raise self._gone(error) from error
        return files[0]

    def clear(self) -> None:
        """Let the keeper drop all pieces of this rank."""
        try:
            self._ask("clear", "", 0)
            if self._keeper.recv(1) != b"\0":
                raise OSError(104, "it gave no answer")
        except OSError as error:
            raise self._gone(error) from error

    def _ask(self, what: str, name: str, size: int) -> None:
        line = json.dumps([what, f"rank{self._rank}/{name}", size])
        self._keeper.sendall(line.encode() + b"\n")

    def _gone(self, error: OSError) -> CommError:
        return CommError(
            f"rank {self._rank}: the process that keeps the memory of this host failed ({error}); "
            "give the host more memory, or leave out FailureConfig(sync_every_n_steps=...)."
        )


def end_keeper(name: str) -> None:
    """End the keeper of this host that has a name, if there is one; its memory is free then."""
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keeper.settimeout(_ANSWER_S)
    with keeper, suppress(OSError):
        keeper.connect(_address(name))
        keeper.sendall(b'["end", "", 0]\n')
        keeper.recv(1)


def end_keepers(but: str = "") -> None:
    """End all keepers that this process is connected to but one: its run, or plan, is over."""
    for name in [known for known in _connected if known != but]:
        _connected.pop(name).close()
        end_keeper(name)


def _connect(name: str, rank: int) -> socket.socket:
    """Connect to the keeper, which is started where there is none."""
    # Without site packages and the variables of Python it starts sooner.
    command = [sys.executable, "-S", "-E", str(_SCRIPT), _address(name)[1:], str(os.getppid())]
    deadline, why = time.monotonic() + _START_S, "it ends at once"
    while time.monotonic() < deadline:
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        keeper.settimeout(_ANSWER_S)
        try:
            keeper.connect(_address(name))
            return keeper
        except OSError:
            keeper.close()
        try:
            # Where another rank has started one just now, this one ends.
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=_START_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        time.sleep(_AGAIN_S)
    raise CommError(
        f"rank {rank}: cannot start the process that keeps the memory of this host ({why}); leave "
        "out FailureConfig(sync_every_n_steps=...)."
    )


def _answers(keeper: socket.socket) -> bool:
    """Return True if a keeper still answers; it may have been killed since."""
    try:
        keeper.sendall(b'["hello", "", 0]\n')
        return keeper.recv(1) == b"\0"
    except OSError:
        return False


def _address(name: str) -> str:
    # abstract: no file, gone with the keeper
    return f"\0rayrec-{name}"
