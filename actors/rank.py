"""`RankActor`: one rank of a run as a Ray actor, a thin shell around a task that runs in a thread.

Every method is short and returns plain data, so `poll()` answers while the training thread is deep
in a kernel or a collective. The environment is set before torch is imported. The actor decides
nothing: it starts the task it is given, keeps what the task reports, remembers how it ended, and
cuts its connections when it is told to or when its own task fails, so that no other rank waits for
it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rayrec.machine.memory import start_thread, tune_malloc
from rayrec.machine.stacks import thread_stacks
from rayrec.train.progress import ProgressLog, RankPoll, RankState, show
from rayrec.train.rank_error import RankError
from rayrec.train.seat import RankAddress, RankContext, RankTask, Seat


class RankActor:
    """Ray actor of one rank.

    Args:
        env: environment variables to set before torch is imported.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        # Ray sends SIGTERM to a process that it ends, while that one may still be on its way out.
        # Ray's handler raises SystemExit then, and the process would end with a traceback.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(env)
        tune_malloc()
        self._log = ProgressLog()
        self._state: RankState = "idle"
        self._error: RankError | None = None
        self._result: Any = None
        self._stop, self._save = threading.Event(), threading.Event()
        self._going_to = 0
        # A late word about an old world must not reach the one that follows it.
        self._switch, self._generation = threading.Lock(), 0
        self._store: Any = None
        self._task: RankTask | None = None
        self._imports = 0
        self._import_error: Exception | None = None
        self._loading = threading.Thread(target=self._import_torch, name="import", daemon=True)
        self._loading.start()

    def describe(self) -> RankAddress:
        """Return the address of this rank's process; answers before torch is imported."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))
        if not os.environ["GLOO_SOCKET_IFNAME"]:
            # an unknown interface: gloo then asks the resolver
            del os.environ["GLOO_SOCKET_IFNAME"]
        return RankAddress(node_id=context.get_node_id(), host=address, pid=os.getpid())

    def stand_by(self, task: Sequence[Any]) -> None:
        """Warm up: import torch, the modules of a task, and those that training imports later."""
        self._fetch(task)
        _import_late()

    def take(self, task: Sequence[Any]) -> None:
        """Fetch a task and import what it names, so that `start` can begin it at once.

        Args:
            task: list with one Ray reference, that of the task.
        """
        self._task = self._fetch(task)

    def stacks(self) -> str:
        """Return the stacks of all threads of this process, as text."""
        return thread_stacks()

    def folder_trouble(self, path: str, token: str) -> str:
        """Return why this rank does not share the folder where the driver left a token, or ""."""
        self._await_imports()
        from rayrec.storage import folder_trouble

        return folder_trouble(path, token)

    def missing_file(self, files: Sequence[tuple[str, int]]) -> str:
        """Return which file, of paths and sizes, this rank does not see as the driver, or ""."""
        self._await_imports()
        from rayrec.storage import missing_file

        return missing_file(files)

    def gpu_memory(self) -> int:
        """Return the free bytes of this rank's GPU."""
        self._await_imports()
        import torch

        return int(torch.cuda.mem_get_info(0)[0])

    def create_store(self, host: str) -> int:
        """Make the rendezvous on this rank and return its port."""
        self._await_imports()
        from rayrec.comm.process_group import create_store

        self._store = create_store(host)
        return int(self._store.port)

    def _fetch(self, task: Sequence[Any]) -> RankTask:
        """Return the task of a Ray reference; it comes in a list, so that Ray does not resolve it.

        Ray would unpickle a task itself, in a thread of its own. What that imports of torch while
        another thread imports torch finds a module that is half made.
        """
        import ray

        self._await_imports()
        (reference,) = task
        self._imports += 1
        try:
            fetched: RankTask = ray.get(reference)
        finally:
            self._imports -= 1
        return fetched

    def start(self, seat: Seat) -> None:
        """Begin the task that was taken, in a thread."""
        task, self._task = self._task, None
        assert task is not None, "a task is taken before it starts"
        with self._switch:
            if self._state == "running":
                raise RuntimeError(f"rank {seat.rank} is already running a task")
            self._generation = seat.generation
            # polls that still wait for news of an earlier task must not hold a thread
            self._log.end()
            self._log, self._state = ProgressLog(), "running"
            self._error, self._result = None, None
            self._stop.clear()
            self._save.clear()
            self._going_to = 0
        start_thread(lambda: self._run(task, seat), f"rank-{seat.rank}", huge_pages=True)

    def poll(self, seen: int = 0, wait_s: float = 0.0) -> RankPoll:
        """State, with the events after the first `seen`.

        It answers when there are any or the task ends, and else after `wait_s` seconds.
        """
        log = self._log
        log.wait(seen, wait_s)
        # read before the rest, since a final state must not outrun what came before it
        state = self._state
        ended = state in ("done", "failed")
        return RankPoll(
            state=state,
            step=log.step,
            phase=log.phase,
            beats=log.beats,
            starts=self._loading.is_alive() or self._imports > 0,
            events=log.after(seen),
            error=self._error if ended else None,
            result=self._result if ended else None,
        )

    def request_stop(self, going_to: int = 0) -> None:
        """Ask the task to end at the next agreed point.

        Args:
            going_to: number of ranks that the run goes on with; 0 where it ends.
        """
        self._going_to = going_to
        self._stop.set()

    def request_save(self) -> None:
        """Ask the task to save at the next agreed point and to go on."""
        self._save.set()

    def _save_asked(self) -> bool:
        asked = self._save.is_set()
        self._save.clear()
        return asked

    def abort(self, generation: int) -> None:
        """Cut all connections of a world, so that a pending collective raises.

        Args:
            generation: generation of the world; calls for another one do nothing.
        """
        self._await_imports()
        from rayrec.comm.process_group import shutdown_sockets

        with self._switch:
            if generation == self._generation:
                self._stop.set()
                shutdown_sockets()

    def free_memory(self) -> None:
        """Free what this host keeps for the run, which has ended."""
        self._await_imports()
        from rayrec.comm.kept_memory import end_keepers

        end_keepers()

    def _import_torch(self) -> None:
        """Import what every task needs, while the driver plans."""
        show("importing torch")
        try:
            import rayrec.train.loop  # noqa: F401
        except Exception as error:  # whoever waits for the imports learns why
            self._import_error = error
        show("waiting for a task")

    def _await_imports(self) -> None:
        """Wait for the imports, and raise what ended them.

        An import of torch that failed leaves modules half made, so that the next one fails with
        another error, which says nothing of the cause.
        """
        self._loading.join()
        if self._import_error is not None:
            raise self._import_error

    def _run(self, task: RankTask, seat: Seat) -> None:
        # only root may leave the low priority that Ray gives its workers
        with contextlib.suppress(PermissionError):
            # for this thread and those that it starts
            os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
        try:
            self._await_imports()
            from rayrec.comm.process_group import destroy_process_group
            from rayrec.train.world import joined

            destroy_process_group()  # where an earlier world could not be left
            context = RankContext(
                seat=seat,
                log=self._log,
                should_stop=self._stop.is_set,
                save_asked=self._save_asked,
                going_to=lambda: self._going_to,
            )
            context.phase("meeting the other ranks")
            with joined(seat, self._store):
                self._result = task.run(context)
            self._state = "done"
        except BaseException as error:  # the thread ends here; whoever polls learns why
            self._error = RankError.of(error, self._log.step)
            self._state = "failed"
        finally:
            show(self._state)
            self._log.end()


def interface_of(address: str) -> str:
    """Name of the network interface that holds the IPv4 `address`, or "" when none does.

    Gloo is told its interface by name, and Ray knows only the address of the node.
    """
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR
                answer = fcntl.ioctl(
                    probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _import_late() -> None:
    """Import what torch imports when a model or an optimizer is made.

    With a small model, this import takes most of the time that a rank needs before its first step,
    while other ranks wait.
    """
    # an error shows again, with its cause, when torch imports it
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo")
