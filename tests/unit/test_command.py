"""How a command ends when storage refuses, output is closed, or words hold line breaks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.cli.main import main as command
from rayrec.command import run_command
from rayrec.errors import CallbackError, SaveError
from rayrec.storage import write_whole

ROOT = Path(__file__).parents[2]
MAIN = "from rayrec.command import run_command\nimport sys\n"
TALKS = "def main(argv):\n    print('x' * 100)\n    return 0\n"
FAILS = """
from rayrec.errors import ConfigError
def main(argv):
    print('x' * 100)
    raise ConfigError('a mistake')
"""


def run(body: str, redirect: str, **more: str) -> tuple[int, list[str]]:
    """Run a main function with its output redirected; return the code and the lines of stderr."""
    script = f"{MAIN}{body}sys.exit(run_command(main, []))"
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", script]
    env = {**os.environ, **more}
    env.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()


def test_a_full_disk_behind_standard_output_is_a_failed_run() -> None:
    code, lines = run(TALKS, ">/dev/full")
    assert code == 1 and len(lines) == 1
    assert lines[0].startswith("failed: the storage refuses to write:")


def test_a_mistake_is_one_line_also_where_output_finds_no_room() -> None:
    assert run(FAILS, ">/dev/full") == (2, ["error: a mistake"])


def test_a_closed_output_is_no_failure() -> None:
    assert run(TALKS, ">&-") == (0, [])
    assert run(FAILS, ">&-") == (2, ["error: a mistake"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_storage_that_refuses_fails_the_run(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: object) -> int:
        raise OSError(number, "no room", "part-00000.parquet")

    assert run_command(main, []) == 1
    error = capsys.readouterr().err
    assert "no room: 'part-00000.parquet'" in error and error.count("\n") == 1
    assert run_command(main, ["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_while_the_command_loads_ends_it_with_the_line_of_later(tmp_path: Path) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "click.py").write_text(slow)  # the first import of the command that is not quick
    # a shell hands its programs in the background a SIGINT that is ignored
    begin = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('rayrec.cli.main', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_notes_of_an_error_stand_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = CallbackError("the callback Diary.on_step raised")
    error.add_note("the run did not end well then: it was\nkilled")

    def main(argv: object) -> int:
        raise error

    assert run_command(main, []) == 1
    said = "the callback Diary.on_step raised; the run did not end well then: it was killed"
    assert capsys.readouterr().err == f"failed: {said}\n"


def test_a_name_that_is_too_long_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise OSError(errno.ENAMETOOLONG, "File name too long", "x" * 9)

    assert run_command(main, []) == 2
    assert capsys.readouterr().err == f"error: [Errno 36] File name too long: '{'x' * 9}'\n"


def test_a_name_that_is_no_utf8_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell gives the bytes as they are, and Arrow takes UTF-8 alone."""
    path = f"{tmp_path}/\udcff"
    assert command(["inspect", path]) == 2
    said = f"error: '{tmp_path}/\\udcff/manifest.json' is no UTF-8; rename the file or folder.\n"
    assert capsys.readouterr().err == said


def test_another_os_error_is_a_defect_and_keeps_its_traceback() -> None:
    def main(argv: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "gone", "x")

    with pytest.raises(FileNotFoundError):
        run_command(main, [])


def test_a_line_break_in_an_argument_makes_no_second_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["serve", "a", "two\nlines"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "two lines" in error


def test_a_device_is_written_to_and_stays_one() -> None:
    before = os.stat("/dev/null"), os.stat("/dev/full")
    write_whole("the result", "/dev/null", "x")
    with pytest.raises(SaveError, match="cannot write the result to /dev/full: "):
        write_whole("the result", "/dev/full", "x")
    assert (os.stat("/dev/null").st_rdev, os.stat("/dev/full").st_rdev) == (
        before[0].st_rdev,
        before[1].st_rdev,
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_letter_that_the_locale_has_no_sign_for_is_replaced(stream: str) -> None:
    body = f"def main(argv):\n    print('\u00e9 \u2265 x', file=sys.{stream})\n    return 0\n"
    code, lines = run(body, ">&2" if stream == "stdout" else "", PYTHONIOENCODING="ascii")
    assert code == 0 and len(lines) == 1 and lines[0].endswith(" x") and lines[0].isascii()
