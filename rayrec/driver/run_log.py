"""`RunLog`: the text file in which a run leaves what is too long for the terminal.

It receives stacks of a run that stands still and tracebacks of ranks that failed. It lies in the
run's folder under `logs/` where that is a local folder, else in the system's folder for temporary
files, where its name cannot be guessed and only its owner reads it. The file is made when the first
entry is written, so most runs leave none.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from rayrec.checks import is_uri


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
