"""The command line of jobs.train_dlrm takes what its users know by name."""

from __future__ import annotations

import time

import pytest

from jobs.recipe import MODELS
from jobs.report import process_start, seconds_by_part, timing_table
from jobs.train_dlrm import parse
from rayrec.optim import SPARSE_OPTIMIZERS
from rayrec.train.progress import Milestone


def test_every_option_reads_into_its_value() -> None:
    words = "--train a --eval b --schema c --model dcn --ranks 3 --plan row_wise --global-batch-size 8 --steps 5 --epochs 2 --sparse-lr 0.5"
    words += " --dense-lr 0.25 --optimizer adam --seed 7 --checkpoint-dir d --result e"
    args = parse(words.split())
    assert (args.train, args.eval, args.schema, args.model, args.ranks, args.plan) == ("a", "b", "c", "dcn", 3, "row_wise")
    assert (args.global_batch_size, args.steps, args.epochs, args.sparse_lr, args.dense_lr) == (8, 5, 2, 0.5, 0.25)
    assert (args.optimizer, args.seed, args.checkpoint_dir, args.result) == ("adam", 7, "d", "e")
    assert parse(["--global-batch", "9"]).global_batch_size == 9


@pytest.mark.parametrize(("option", "names"), [("--optimizer", SPARSE_OPTIMIZERS), ("--model", MODELS)])
def test_every_name_is_taken_and_others_are_not(option: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for name in names:
        parse([option, name])
    with pytest.raises(SystemExit):
        parse([option, "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_start_up_is_told_by_part() -> None:
    timing = [Milestone("process", 10.0), Milestone("plan", 13.5), Milestone("imports", 11.0), Milestone("first step", 14.0)]
    assert seconds_by_part(timing) == {"imports": 1.0, "plan": 2.5, "first step": 0.5}
    assert "to the first step          4.00 s" in timing_table(timing).splitlines()[-1]
    assert time.time() - 3600 < process_start() <= time.time()
