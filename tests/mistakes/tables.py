"""All mistakes, from the tables of the modules beside this one."""

from __future__ import annotations

from tests.mistakes import (
    converters,
    exports,
    keeping,
    plans,
    rows,
    run_files,
    schemas,
    tools,
    towers,
    training,
)
from tests.mistakes.case import Mistake
from tests.mistakes.sound import LINES

OWN = "own"  # sound lines that need a mistake's own files have it in their names
SOUND = [
    ("train_dlrm", ("planted",)),
    ("rayrec train", ("clicks", "towers")),
    ("convert_criteo", ("criteo",)),
    ("convert_movielens", ("films",)),
    ("rayrec plan", ("plan",)),
    ("rayrec make-data", ("make-data",)),
    ("rayrec train", ("train",)),
    ("rayrec evaluate", ("scores",)),
    ("rayrec predict", ("predictions", "folder", "artifact")),
    ("rayrec export", ("export",)),
]

MISTAKES: list[Mistake] = [
    *training.MISTAKES,
    *keeping.MISTAKES,
    *towers.MISTAKES,
    *schemas.MISTAKES,
    *rows.MISTAKES,
    *plans.MISTAKES,
    *converters.MISTAKES,
    *tools.MISTAKES,
    *run_files.MISTAKES,
    *exports.MISTAKES,
    *[
        Mistake(command=command, base=base, options="", says="", code=0)
        for command, bases in SOUND
        for base in bases
        if base in LINES
    ],
]
