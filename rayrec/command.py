"""End of a command of rayrec: an exit code and, after a mistake, one line.

| code | means |
|---|---|
| 0 | done |
| 1 | the run failed: a rank died, the storage was full |
| 2 | a mistake of the user's: options, data, a plan, a checkpoint |
| 3 | the machine or its Ray cluster is in trouble: the same may succeed later |
| 130, 143 | ended by Ctrl-C or SIGTERM, after saving what the run keeps |

`--debug` shows the traceback behind the line. Needs the standard library only.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from rayrec.errors import ClusterError, RayrecError, RunInterrupted, TrainingFailed, is_user_mistake

DEBUG = "--debug"
# a disk or a quota that is full, a file beyond its limit, a read-only or a broken disk
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
Main = Callable[[Sequence[str] | None], int]


def run_command(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call `main` and turn what it raises into one line on standard error and an exit code.

    Args:
        main: takes the arguments and returns the exit code.
        argv: the arguments; None takes those of the process.
    Returns:
        the exit code; see the table above. An error that is neither a `RayrecError` nor storage
        that refuses is a defect, of rayrec or of the user's own model code, and keeps its
        traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        # a terminal or a locale that has no sign for a letter is no reason to end
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        return _run(main, argv)
    finally:
        try:
            _flush()
        except OSError:  # what is left to be said has no reader, or no room
            _drop_output()


def _run(main: Main, argv: Sequence[str] | None) -> int:
    debug = DEBUG in (sys.argv[1:] if argv is None else argv)
    try:
        code = main(argv)
        _flush()
        return code
    except RunInterrupted as stop:
        print(f"interrupted by {signal.Signals(stop.signal_number).name}", file=sys.stderr)
        return int(stop.code or 0)
    except SystemExit as ended:  # the parser has said why
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        if error.errno not in REFUSALS:
            raise
        if debug:
            traceback.print_exception(error)
        print(f"failed: the storage refuses to write: {one_line(error)}", file=sys.stderr)
        return 1
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":
            raise
        print(f"error: {error.object!r} is no UTF-8; rename the file or folder.", file=sys.stderr)
        return 2
    except RayrecError as error:
        code = 2 if is_user_mistake(error) else 3 if isinstance(error, ClusterError) else 1
        if debug:
            traceback.print_exception(error)
        print(
            f"{'error' if code == 2 else 'failed'}: {one_line(error)}{_more(error, debug)}",
            file=sys.stderr,
        )
        return code


def _flush() -> None:
    if sys.stdout is not None:  # None where it was closed before the start
        sys.stdout.flush()


def _drop_output() -> None:
    """Send what is still printed nowhere, so that the interpreter's end does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def _more(error: RayrecError, debug: bool) -> str:
    """Say the notes of an error, and where to read the traceback of a rank that failed."""
    notes = "".join(f"; {' '.join(note.split())}" for note in getattr(error, "__notes__", ()))
    if not isinstance(error, TrainingFailed) or debug or not error.traceback:
        return notes
    where = f"in {error.log}" if error.log else "shown with --debug"
    return f"{notes} (its traceback is {where})"
