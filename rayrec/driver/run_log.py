"""What a run tells of itself when something is wrong: `RunLog` and `StallWatch`.

The log is the text file that receives what is too long for the terminal: stacks of a run that
stands still and tracebacks of ranks that failed. It lies in the run's folder under `logs/` where
that is a local folder, else in the system's folder for temporary files, where its name cannot be
guessed and only its owner reads it. The file is made when the first entry is written, so most runs
leave none.

A run is always in some phase: connecting to Ray, waiting for room, training. When a phase shows no
sign of progress for `STALL_S` seconds, a thread says so in one line, writes the stacks of the
driver and of all ranks to the log, and says it again after twice, four times, ... as long. It ends
nothing: timeouts do that. Costs one look a second.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rayrec.checks import is_uri
from rayrec.machine.stacks import thread_stacks

STALL_S = 30.0


class RunLog:
    """The log of one run.

    Args:
        run_path: absolute folder or URI of the run, or None.
        name: name of the run, which the file name contains.
    Attributes:
        path: path of the log file; None before the first entry if the run has no local folder.
    """

    def __init__(self, run_path: str | None, name: str = "run") -> None:
        stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self._prefix = f"rayrec-{name}-{stamp}-"
        self.path: Path | None = None
        if run_path is not None and not is_uri(run_path):
            self.path = Path(run_path) / "logs" / f"driver-{stamp}.log"
        self._lock = threading.Lock()

    def write(self, text: str) -> str:
        """Append an entry with the time; returns where it can be read, or why it cannot."""
        entry = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text.rstrip()}\n"
        with self._lock:
            try:
                if self.path is None:
                    # made anew: others may write into the folder, and lay a link to another file
                    self.path = _new_file(self._prefix)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(entry)
            except OSError as error:
                where = self.path or tempfile.gettempdir()
                return f"no file, since {where} cannot be written: {error}"
        return str(self.path)


def _new_file(prefix: str) -> Path:
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".log")
    os.close(handle)
    return Path(name)


class StallWatch:
    """Watches one run.

    Args:
        say: receives the line for the user; called in the watch's own thread.
        log: receives the stacks.
        rank_stacks: returns the stacks of the ranks as text, within some seconds.
        stall_s: seconds without progress until the first line.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        log: RunLog,
        rank_stacks: Callable[[], str],
        stall_s: float = STALL_S,
    ) -> None:
        self._say, self._log, self._rank_stacks = say, log, rank_stacks
        self._stall_s = stall_s
        # `at` writes these from the run's thread and `_watch` reads them; a torn read only costs a
        # line that comes a second early or late.
        self._where, self._patient = "starting", False
        self._since = time.monotonic()
        self._next_s = stall_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rayrec-stall", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()

    def at(self, where: str, *, patient: bool = False) -> None:
        """Record progress: the run has come to `where`.

        Args:
            where: completes "no progress for 30 s while ...", for example "starting the ranks".
            patient: waiting is expected here, so no stacks are written.
        """
        self._where, self._patient = where, patient
        self._since = time.monotonic()
        self._next_s = self._stall_s

    def _watch(self) -> None:
        while not self._end.wait(min(1.0, self._stall_s / 4)):
            silent_s = time.monotonic() - self._since
            if silent_s < self._next_s:
                continue
            # It doubles, so that a run that hangs for a night writes a few lines and not thousands.
            self._next_s *= 2
            line = f"no progress for {silent_s:.0f} s while {self._where}"
            if not self._patient:
                stacks = f"-- driver\n{thread_stacks()}\n{self._rank_stacks()}"
                path = self._log.write(f"{line}\n{stacks}")
                line += f"; the stacks of the driver and of the ranks are in {path}"
            self._say(line)
