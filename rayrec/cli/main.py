"""Entry point of the `rayrec` command and of its jobs: quiet at Ctrl-C from its first moment on.

`rayrec.command` turns Ctrl-C into one line, once it is loaded. Until then the signal ends the
process as it ends any other, without the traceback of an import.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from importlib import import_module


def start(run: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Load the command line and run a command; returns the exit code, see `rayrec.command`."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_ours = is_ours and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rayrec.command import run_command  # late: these imports take a while

    import_module("rayrec.cli.group")
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command(run, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""

    def run(words: Sequence[str] | None) -> int:
        from rayrec.cli.group import run

        return run(words)

    return start(run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
