"""What a run may publish: what contradicts itself is refused before anything starts."""

from __future__ import annotations

import pytest

from rayrec.driver import PublishConfig, RunConfig
from rayrec.errors import ConfigError
from rayrec.quant import QuantType
from rayrec.train.publish_config import ROW_TYPES


def test_types_are_those_of_packed_rows():
    assert set(ROW_TYPES) == {kind.name.lower() for kind in QuantType}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one"),
        ({"every_n_steps": 1, "every_s": 2.0}, "exactly one"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"every_s": 0.0}, "every_s"),
        ({"every_s": 1.0, "full_every": 1}, "full_every"),
        ({"every_s": 1.0, "num_to_keep": 1}, "without full_every"),
        ({"every_s": 1.0, "dtype": "int3"}, "int3"),
        ({"every_s": 1.0, "tables": {"user": "int2"}}, "'user'"),
        ({"every_s": 1.0, "path": "s3://bucket/run"}, "local"),
        ({"every_s": 1.0, "max_logit_error": 0.0}, "max_logit_error"),
        ({"every_s": 1.0, "signing_key": ""}, "signing_key"),
    ],
)
def test_what_makes_no_sense_is_refused(options, says):
    with pytest.raises(ConfigError, match=says) as error:
        PublishConfig(**options)
    assert "\n" not in str(error.value)


def test_a_run_says_where_it_publishes(tmp_path):
    publish = PublishConfig(every_n_steps=4)
    for storage in (None, "s3://bucket/runs"):
        with pytest.raises(ConfigError, match=r"PublishConfig\(path=\.\.\.\)"):
            RunConfig(global_batch_size=8, steps=8, storage_path=storage, publish=publish)
    RunConfig(global_batch_size=8, steps=8, storage_path=str(tmp_path), publish=publish)
    with pytest.raises(ConfigError, match="no multiple of accumulate"):
        RunConfig(
            global_batch_size=8,
            steps=8,
            accumulate=3,
            publish=PublishConfig(every_n_steps=4, path=str(tmp_path)),
        )


def test_a_table_that_does_not_exist_is_named():
    config = PublishConfig(every_s=1.0, tables={"users": "fp16"})
    with pytest.raises(ConfigError, match=r"'users'.*did you mean user"):
        config.check_tables(["user", "item"])
