"""The job of `rayrec chaos`: its command line is read, and changed for a run under faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.chaos.job import Job, read_job, set_values
from rayrec.errors import ConfigError
from rayrec.runs.toml_tree import read_settings
from tests.words import sets

MANY = "run.failure.max_failures=-1"


def read(words: list[str]) -> Job:
    return read_job(words, read_settings(None, set_values(words)).tables, default_ranks=2)


@pytest.mark.parametrize("form", [["--checkpoint-dir", "{}"], ["--checkpoint-dir={}"]])
def test_a_run_gets_a_folder_of_its_own_and_what_recovery_needs(
    form: list[str], tmp_path: Path
) -> None:
    given = [word.format(tmp_path / "c") for word in form]
    failures, auto = "run.failure.max_failures", "run.resume_from=auto"
    job = read(["sh", *given, "--ranks=3", *sets(f"{failures}=5")])
    assert (job.folder, job.ranks, job.cpus) == (tmp_path / "c", 3, 1.0)
    own = [word.format("/x/calm") for word in form]
    assert job.command(Path("/x/calm")) == [
        *("sh", *own, "--ranks=3", *sets(f"{failures}=5", auto))
    ]
    waits = job.command(Path("/x/calm"), waits=True)
    assert waits[-2:] == sets("scaling.placement_timeout_s=120")
    assert job.spares == 0 and read(["sh", *given, *sets("scaling.spares=2")]).spares == 2
    alone = read(["sh", *given, *sets(auto, "scaling.cpus_per_worker=0.5")])
    assert (alone.ranks, alone.cpus) == (2, 0.5)
    assert alone.command(Path("/y"))[-2:] == sets(f"{failures}=-1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("no-such-command --checkpoint-dir {}", "'no-such-command' is not found"),
        ("sh", "no --checkpoint-dir"),
        ("sh --checkpoint-dir", "no --checkpoint-dir"),
        ("sh --checkpoint-dir s3://bucket/run", "no folder of this machine"),
        ("sh --checkpoint-dir {}/full", "not an empty folder"),
        ("sh --checkpoint-dir {}/full/file", "not an empty folder"),
        ("sh --checkpoint-dir {} --local", "--ranks 1"),
        ("sh --checkpoint-dir {} --set scaling.num_workers=0", "--ranks 1"),
        ("sh --checkpoint-dir {} --set run.resume_from=latest", "run.resume_from=latest"),
        ("sh --checkpoint-dir {} --ranks many", "--ranks is 'many'"),
    ],
)
def test_a_job_that_cannot_be_shaken_is_refused(words: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    own = tmp_path / "new" if "{}/" not in words else tmp_path
    with pytest.raises(ConfigError, match=says):
        read(words.format(own).split())


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        (["run.failure={max_failures=3}"], ["run.resume_from=auto"]),
        (["run.failure={log_decisions=true}", "run.resume_from = auto"], [MANY]),
        (["run.failure.max_failures = 3", "run.resume_from='auto'"], []),
        (["run.failure.max_failures_of=3"], [MANY, "run.resume_from=auto"]),
    ],
)
def test_only_keys_that_no_set_says_are_added(
    changes: list[str], added: list[str], tmp_path: Path
) -> None:
    words = ["sh", f"--checkpoint-dir={tmp_path}/c", *sets(*changes)]
    given = [*words[:1], f"--checkpoint-dir={tmp_path}/calm", *words[2:]]
    assert read(words).command(tmp_path / "calm") == [*given, *sets(*added)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("run.resume_from = latest", "--set run.resume_from=latest, and every run"),
        ("scaling.num_workers = 0", "--ranks 1"),
        ("scaling.num_workers=[1, 2]", r"--ranks is \[1, 2\]; it must be a number above 0"),
        ("scaling={spares=1}", "must be SECTION.KEY=VALUE"),
        ("run.steps", "must be SECTION.KEY=VALUE"),
    ],
)
def test_what_a_set_says_is_read_as_the_run_reads_it(
    change: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        read(["sh", "--checkpoint-dir", str(tmp_path), *sets(change)])
