"""Mistakes of users end with code 2 and one line; `python -m tests.mistakes` prints how each of
them ends.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.mistakes.__main__ import try_all
from tests.mistakes.case import faults
from tests.mistakes.report import outcome
from tests.mistakes.sound import COMMANDS, LINES
from tests.mistakes.tables import MISTAKES

EVERY = 150  # a default run tries one in so many
PARTS = 4  # of all, each with a bound of its own on its time


@pytest.mark.parametrize(
    "mistakes",
    [
        pytest.param(MISTAKES[::EVERY], id="some"),
        *(
            pytest.param(
                MISTAKES[part::PARTS],
                id=f"all{part}",
                marks=[pytest.mark.slow, pytest.mark.timeout(1200)],
            )
            for part in range(PARTS)
        ),
    ],
)
def test_a_mistake_ends_in_one_line_and_leaves_nothing(mistakes):
    # a short name: the path of a Unix socket has room for 107 bytes
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        endings = try_all(mistakes, Path(folder), processes=1, cold=False, failed_only=True)
    wrong = [outcome(mistake, ending) for mistake, ending in endings if faults(mistake, ending)]
    assert len(endings) == len(mistakes) and not wrong, "\n".join(wrong)


def test_there_are_mistakes_at_every_command():
    commands = {mistake.command for mistake in MISTAKES}
    assert (
        len(MISTAKES) >= 800
        and {"train_dlrm", "rayrec train", "rayrec evaluate", "rayrec plan", "rayrec make-data"}
        <= commands
    )


def test_every_mistake_is_made_at_a_sound_line():
    assert {mistake.command for mistake in MISTAKES} <= COMMANDS.keys()
    assert {mistake.base for mistake in MISTAKES} <= {*LINES, ""}
