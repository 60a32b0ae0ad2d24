"""Entry point of the `rayrec` command: quiet at Ctrl-C from its first moment on.

`rayrec.command` turns Ctrl-C into one line, once it is loaded. Until then the signal ends the
process as it ends any other, without the traceback of an import.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code, see `rayrec.command`."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_ours = is_ours and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rayrec.cli import group  # late: its imports take a while

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return group.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
