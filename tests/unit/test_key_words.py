"""Messages about options of a run name the keys of a run file where the user wrote one."""

from __future__ import annotations

import re

import pytest

from rayrec.driver import RunConfig, ScalingConfig
from rayrec.driver.scaling_checks import check_run
from rayrec.errors import CheckpointError, ConfigError
from rayrec.runs.key_words import in_key_words, key_words
from rayrec.runs.run_file import RunFile
from rayrec.runs.start import train

PYTHON = re.compile(r"Config\b")


@pytest.mark.parametrize(
    ("said", "in_keys"),
    [
        ("give RunConfig(storage_path=...).", "give run.storage_path."),
        ("FailureConfig has max_failures=3, and", "run.failure.max_failures=3, and"),
        ("and this ScalingConfig has use_gpu=True", "and scaling.use_gpu=True"),
        (
            "CheckpointConfig(every_s=2.5) says; give",
            "run.checkpoint.every_s=2.5 says; give",
        ),
        ("give ProfileConfig(skip_steps=..., steps=2)", "give run.profile.skip_steps and "
         "run.profile.steps=2"),
        ("ScalingConfig(num_workers=(least, most))", "scaling.num_workers=(least, most)"),
        # what stands for no key stays as it is
        ("EvaluationConfig has a type", "EvaluationConfig has a type"),
        ("ParameterConstraints(ranks=...) or Other(x=1)", "ParameterConstraints(ranks=...) or "
         "Other(x=1)"),
        ("RunConfig(colour=...)", "RunConfig(colour=...)"),
    ],
)  # fmt: skip
def test_an_option_of_python_is_told_as_its_key(said: str, in_keys: str) -> None:
    assert key_words(said) == in_keys


def test_the_class_of_an_error_and_other_errors_stay() -> None:
    with pytest.raises(ConfigError, match=r"^give run.name$"), in_key_words():
        raise ConfigError("give RunConfig(name=...)")
    with pytest.raises(CheckpointError, match=r"RunConfig\(name"), in_key_words():
        raise CheckpointError("RunConfig(name=...)")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["run.checkpoint.num_to_keep=2"], "run.storage_path"),
        (["run.checkpoint.every_n_steps=2"], "run.storage_path"),
        (["run.evaluation={every_n_steps=2, score='auc', keep_best=true}"], "run.storage_path"),
        (["run.failure.sync_every_n_steps=2"], "run.failure.sync_every_n_steps"),
        (["run.resume_from=auto"], "run.storage_path"),
        (["run.publish.every_n_steps=2"], "run.publish.path"),
        (["run.steps=2", "run.epochs=2"], "run.epochs"),
        (["run.name=a/b", "run.storage_path=c"], "run.name"),
        (["run.name=clicks"], "run.storage_path"),
        (["scaling.spares=1"], "run.failure.max_failures"),
        (["scaling.num_workers=[1, 2]"], "run.storage_path"),
        (["scaling.num_workers=0", "run.failure.max_failures=2"], "run.failure.max_failures"),
        (["scaling.num_workers=0", "run.heartbeat_timeout_s=5"], "run.heartbeat_timeout_s"),
        (["scaling.num_workers=0", "run.stop_timeout_s=5"], "run.stop_timeout_s"),
        (["scaling.grow_after_s=5"], "scaling.num_workers"),
    ],
)
def test_a_mistake_in_a_run_file_is_told_by_its_keys(changes: list[str], key: str) -> None:
    """Each is found before rows are made or Ray starts."""
    with pytest.raises(ConfigError) as caught, in_key_words():
        settings = RunFile.read(None, ["data.planted.rows_train=100", *changes])
        train(settings, None)  # type: ignore[arg-type]
    assert key in str(caught.value) and not PYTHON.search(str(caught.value)), caught.value


def test_a_run_on_ranks_may_bound_their_processes() -> None:
    run = RunConfig(global_batch_size=2, steps=1, heartbeat_timeout_s=5.0)
    check_run(run, ScalingConfig(num_workers=1))
    with pytest.raises(ConfigError, match="heartbeat_timeout_s=5"):
        check_run(run, ScalingConfig(num_workers=0))


def test_two_towers_refuse_drop_last_since_they_do_it_in_any_case() -> None:
    towers = ["model.model=two_tower", "model.query=['u']", "model.candidate=['i']"]
    assert RunFile.read(None, towers).run.drop_last is False
    with pytest.raises(ConfigError, match=r"\[run\] drop_last would have no effect"):
        RunFile.read(None, [*towers, "run.drop_last=true"])
