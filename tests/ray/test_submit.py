"""`ray start --head` and `ray job submit --working-dir .` as a user types them: success, and what
is told when the job fails.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.data.synthetic import SyntheticPaths
from tests.clicks import write_spoilt
from tests.ray.heads import Head, started_head
from tests.words import sets

pytestmark = pytest.mark.slow
JOB = ("python", "-m", "jobs.train_dlrm")
FEW = sets("data.planted.rows_train=1000", "data.planted.rows_eval=100")


@pytest.fixture(scope="module")
def head(private_home: Path) -> Iterator[Head]:
    with started_head(private_home, num_cpus=3) as head:
        yield head


def test_a_submitted_job_trains(head: Head, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = sets(
        "data.planted.rows_train=30000",
        "data.planted.rows_eval=3000",
        "run.global_batch_size=512",
        "run.steps=50",
    )
    done = head.submit(*JOB, "--ranks", "2", *words, "--result", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "done: step 50, 25600 rows" in done.stdout
        and "bayes_auc" in done.stdout
        and "succeeded" in done.stdout + done.stderr
    )
    assert result.is_file() and head.exit_code(done.stdout + done.stderr) == 0


def test_a_rank_that_fails_is_the_cause_that_the_submitter_reads(
    head: Head, clicks: SyntheticPaths, tmp_path: Path
) -> None:
    source = next(clicks.train.glob("*.parquet"))
    (tmp_path / "train").mkdir()
    bad = tmp_path / "train" / "part-bad.parquet"
    write_spoilt(source, bad, "cat_0", 4321, 123456, statistics=False)
    done = head.submit(
        *JOB, "--ranks", "2", *sets(f"data.train={tmp_path}/train", f"data.schema={clicks.schema}")
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 2
    assert re.search(
        r"error: .*'cat_0'.*id 123456 in row 4321 of '.*part-bad.*found by rank [01] of 2", told
    ), told
    assert "Traceback" not in told


def test_a_mistake_is_told_in_one_line_before_anything_starts(head: Head) -> None:
    done = head.submit(*JOB, "--ranks", "2", "--plan", "rowwise", *FEW)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 2
    assert "error: plan 'rowwise' is neither a file nor one of: auto" in told


def test_more_ranks_than_the_cluster_has_cpus_is_refused_with_numbers(head: Head) -> None:
    started = time.monotonic()
    done = head.submit(*JOB, "--ranks", "64", *FEW)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 2
    assert re.search(
        r"error: 64 ranks .*the cluster has 3\..*does not grow by itself.*placement_timeout_s", told
    ), told
    assert time.monotonic() - started < 100, (
        "not the 120 s that a cluster with an autoscaler is given"
    )


def test_what_shall_stay_is_not_written_into_rays_temporary_copy(head: Head) -> None:
    words = ("--ranks", "1", *FEW)
    for option in ("--checkpoint-dir", "--result"):
        done = head.submit(*JOB, *words, option, "runs/a")
        told = done.stdout + done.stderr
        assert head.exit_code(told) == 2
        assert re.search(
            rf"error: {option}='runs/a' leads to .*working_dir_files.*absolute path", told
        ), told
