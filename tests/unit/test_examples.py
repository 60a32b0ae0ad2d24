"""The programs of examples/ run as they stand, are short, and do what they say."""

from __future__ import annotations

import json
import re
import runpy
import time
from pathlib import Path

import pytest

from rayrec.cli.main import main
from rayrec.data import Feature, FeatureSchema
from tests.unit.documents import ROOT, run
from tests.warm import Warm

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
# in one worker process, with the other tests that start programs as its forks
pytestmark = pytest.mark.xdist_group("warm interpreter")


def printed(name: str, folder: Path, warm: Warm, *arguments: str) -> str:
    """What a program prints that is started in another folder than its own."""
    return run(ROOT / "examples" / name, folder, warm, *arguments, timeout_s=240)


def number(text: str, before: str) -> float:
    """The number that follows some words."""
    found = re.search(rf"{re.escape(before)} ([\d.]*\d)", text)
    assert found is not None, f"nothing says {before!r}:\n{text}"
    return float(found[1])


def test_every_example_is_short_and_listed():
    listed = (ROOT / "examples/README.md").read_text()
    assert len(PROGRAMS) >= 5
    for path in PROGRAMS:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name
        assert f"]({path.name})" in listed, f"examples/README.md does not list {path.name}"


def test_every_example_is_run_here():
    tests = Path(__file__).read_text()
    for path in PROGRAMS:
        assert f'printed("{path.name}"' in tests, f"no test runs {path.name}"


def test_a_big_model_is_planned_without_hardware(tmp_path: Path, warm: Warm):
    text = printed("plan_without_hardware.py", tmp_path, warm)
    assert "table 'query'" in text and "Any one of these makes a plan exist" in text
    assert "Plan: 6 tables on 16 ranks (2 hosts x 8 cuda)" in text


def test_the_tables_of_mlperf_are_planned_at_full_size(tmp_path: Path, warm: Warm):
    full, large, small, halved = printed("plan_mlperf.py", tmp_path, warm).split("Eight GPUs of ")[
        1:
    ]
    assert "lower batch_size from 1024 to 512 rows per rank" in full
    assert "store all tables as FP16" in small
    for fits in (large, halved):
        assert "Plan: 11 tables on 8 ranks (1 host x 8 cuda)" in fits


def test_rayrec_plan_makes_the_page_of_that_plan_in_seconds(tmp_path: Path):
    example = runpy.run_path(str(ROOT / "examples" / "plan_mlperf.py"))
    tables, limits = tuple(example["TABLES"]), example["CONSTRAINTS"]
    features = tuple(Feature(name=table.name, column=table.name) for table in tables)
    schema, constraints, page = (tmp_path / name for name in ("s.json", "c.json", "plan.html"))
    FeatureSchema(label="liked", features=features, tables=tables).save(schema)
    factors = {name: {"pooling_factor": one.pooling_factor} for name, one in limits.items()}
    constraints.write_text(json.dumps(factors))
    words = ["plan", "--schema", str(schema), "--constraints", str(constraints)]
    words += ["--topology", "b200", "--hosts", "1", "--batch", "512", "--reserve", "0.05"]
    started = time.process_time()
    assert main([*words, "--html", str(page)]) == 0
    # CPU time, which other processes do not lengthen
    assert time.process_time() - started < 10
    drawn = page.read_text()
    assert len(tables) == 11 and all(f"<td>{table.name}</td>" in drawn for table in tables)
    assert "Predicted time" in drawn and all(f"rank {rank}: " in drawn for rank in range(8))


@pytest.mark.slow
def test_mlperfs_model_learns_from_day_to_day(tmp_path: Path, warm: Warm):
    days = printed("train_mlperf.py", tmp_path, warm).splitlines()
    scores = [number(day, "auc") for day in days if day.startswith("day ")]
    assert len(scores) == 6 and scores[-1] > max(0.62, scores[0] + 0.05)


@pytest.mark.slow
def test_a_loop_of_ones_own_learns(tmp_path: Path, warm: Warm):
    text = printed("own_loop.py", tmp_path, warm)
    assert number(text, "at the first and") < 0.8 * number(text, "steps, loss")
    assert 0.75 < number(text, "auc") < 0.85


@pytest.mark.slow
def test_two_towers_find_the_items_of_a_users_topic(tmp_path: Path, warm: Warm):
    text = printed("retrieval.py", tmp_path, warm)
    # 50 of the 1,000 items are right, so ten places can hold a fifth of them
    assert 0.15 < number(text, "recall@10") <= 0.2
    assert 0.8 < number(text, "recall@50") <= 1


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_without_a_break(tmp_path: Path, warm: Warm):
    text = printed("warm_start.py", tmp_path, warm)
    resumed = number(text, "resumed, step 50: auc")
    assert resumed == number(text, "without a break, step 50: auc")
    assert number(text, "step 30: auc") < resumed
    assert number(text, "from its weights: auc") > number(text, "from nothing: auc") + 0.05


def test_the_driver_trains_a_model_of_ones_own(tmp_path: Path, warm: Warm):
    text = printed("own_model.py", tmp_path, warm)
    assert 0.75 < number(text, "\nauc") < number(text, "of at most")


@pytest.mark.slow
@pytest.mark.ray
def test_two_ray_ranks_train_the_same_model(tmp_path: Path, warm: Warm):
    text = printed("own_model.py", tmp_path, warm, "2")
    assert "on 2 ranks" in text
    assert 0.75 < number(text, "\nauc") < number(text, "of at most")


@pytest.mark.slow
def test_a_shaped_loop_stops_early(tmp_path: Path, warm: Warm):
    text = printed("shaped_loop.py", tmp_path, warm)
    assert number(text, "surprise") < 0.5 and "ne was not better in 2 evaluations" in text
