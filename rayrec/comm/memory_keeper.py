"""A process beside the ranks of a host that keeps their memory when they are killed.

It makes memory without a name (memfd) by request, holds it open and hands it out by name. So the
rows of a rank outlive its process, nothing lies in /dev/shm, and all memory is free when this
process ends in whatever way.

It ends when a rank or the driver says so; some seconds after the raylet of its ranks ended, when no
rank is connected; and when no rank has been connected for a minute.

The script needs the standard library only and imports nothing of rayrec, so that it starts in a
moment and takes little memory. Messages are lines of JSON; an answer is one byte, with the file.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import struct
import sys
import time
from contextlib import suppress

KEEP_S = 60.0
ORPHANED_S = 2.0
_LOOK_S = 0.5


class MemoryKeeper:
    """Files by name, for the processes of one user that connect to an address.

    Args:
        listener: the socket at which they connect.
        parent: a process whose end is that of the cluster.
    """

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener, self._parent = listener, parent
        self._clients: dict[int, tuple[socket.socket, bytes]] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._poll = select.poll()
        self._ended = False

    def run(self) -> None:
        """Answer requests until one says to end, or no process has been connected for long."""
        alone_since = time.monotonic()
        self._poll.register(self._listener, select.POLLIN)
        while not self._ended:
            for number, _ in self._poll.poll(1000 * _LOOK_S):
                if number == self._listener.fileno():
                    self._accept()
                else:
                    self._read(number)
            now = time.monotonic()
            if self._clients:
                alone_since = now
            limit = KEEP_S if os.path.exists(f"/proc/{self._parent}") else ORPHANED_S
            self._ended = self._ended or now > alone_since + limit

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        # pid, uid, gid of who connects: the address can be seen by every user
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", raw)[1] == os.getuid():
            self._clients[client.fileno()] = client, b""
            self._poll.register(client, select.POLLIN)
        else:
            client.close()

    def _read(self, number: int) -> None:
        client, begun = self._clients[number]
        data = b""
        with suppress(OSError):
            data = client.recv(1 << 16)
        if not data:
            del self._clients[number]
            self._poll.unregister(number)
            client.close()
            return
        *lines, rest = (begun + data).split(b"\n")
        self._clients[number] = client, rest
        for line in lines:
            with suppress(OSError):
                self._answer(client, json.loads(line))

    def _answer(self, client: socket.socket, asked: list[object]) -> None:
        what, name, size = str(asked[0]), str(asked[1]), int(str(asked[2]))
        if what == "take":
            try:
                file = self._file(name, size)
            except OSError as error:
                client.sendall(bytes([error.errno or 1]))
                return
            socket.send_fds(client, [b"\0"], [file])
            return
        if what == "clear":
            for known in [known for known in self._files if known.startswith(name)]:
                os.close(self._files.pop(known)[0])
        self._ended = what == "end"
        client.sendall(b"\0")

    def _file(self, name: str, size: int) -> int:
        file, made = self._files.get(name, (-1, -1))
        if made == size:
            return file
        if file >= 0:
            os.close(self._files.pop(name)[0])
        file = os.memfd_create("rayrec-kept", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        self._files[name] = file, size
        return file


def main(address: str, parent: int) -> None:
    """Leave the caller, listen and answer; does nothing where another keeper has the address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        return
    listener.listen(64)
    # Away from the rank that starts it: Ray ends the children of a worker with it.
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    MemoryKeeper(listener, parent).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
