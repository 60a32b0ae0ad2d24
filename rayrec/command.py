"""How a command of rayrec ends: an exit code and, after a mistake, one line.

| code | means |
|---|---|
| 0 | done |
| 1 | the run failed: a rank died, the storage was full |
| 2 | a mistake of the user's: options, data, a plan, a checkpoint |
| 130, 143 | ended by Ctrl-C or SIGTERM, after saving what the run keeps |

`--debug` shows the traceback behind the line. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from rayrec.errors import RayrecError, RunInterrupted, TrainingFailed, is_user_mistake

DEBUG = "--debug"
Main = Callable[[Sequence[str] | None], int]


class Parser(argparse.ArgumentParser):
    """An argument parser that says a mistake in one line, and knows `--debug`."""

    def __init__(self, *args: object, debug: bool = True, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)  # an abbreviation changes its meaning with the next option
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        if debug:
            self.add_argument(DEBUG, action="store_true", help="after an error, show its traceback, too")

    def error(self, message: str) -> NoReturn:
        """End with code 2 and one line."""
        print(f"error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def run_command(main: Main, argv: Sequence[str] | None = None) -> int:
    """Call `main` and turn what it raises into one line on standard error and an exit code.

    Args:
        main: takes the arguments and returns the exit code.
        argv: the arguments; None takes those of the process.
    Returns:
        the exit code; see the table above. An error that is no `RayrecError` is a defect, of rayrec
        or of the user's own model code, and keeps its traceback.
    """
    debug = DEBUG in (sys.argv[1:] if argv is None else argv)
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except RunInterrupted as stop:
        print(f"interrupted by {signal.Signals(stop.signal_number).name}", file=sys.stderr)
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except RayrecError as error:
        code = 2 if is_user_mistake(error) else 1
        if debug:
            traceback.print_exception(error)
        print(f"{'error' if code == 2 else 'failed'}: {one_line(error)}{_more(error, debug)}", file=sys.stderr)
        return code


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def _more(error: RayrecError, debug: bool) -> str:
    """Where the traceback of a rank that failed can be read."""
    if not isinstance(error, TrainingFailed) or debug or not error.traceback:
        return ""
    where = f"in {error.log}" if error.log else "shown with --debug"
    return f" (its traceback is {where})"
