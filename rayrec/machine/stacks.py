"""The stacks of this process's threads, for a run that stands still."""

from __future__ import annotations

import faulthandler
import tempfile


def thread_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
