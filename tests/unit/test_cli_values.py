"""Options take what they say and name themselves where they do not."""

from __future__ import annotations

from typing import Any

import click
import pytest

from rayrec.cli import values
from rayrec.cli.values import count, named_choice
from rayrec.runs.toml_tree import Option, read_settings

TYPES: dict[str, tuple[click.ParamType, dict[str, Any], list[str]]] = {
    "whole": (count(), {"1": 1, "12": 12}, ["0", "-1", "1.5", "x", "", "nan", "1e3"]),
    "between": (count(2, 3), {"2": 2, "3": 3}, ["1", "4"]),
    "seed": (values.SEED, {"0": 0, str(2**63 - 1): 2**63 - 1}, ["-1", str(2**63), "0.5", "x"]),
    "positive": (values.POSITIVE, {"0.5": 0.5}, ["0", "-1", "nan", "inf", "x", ""]),
    "fraction": (values.FRACTION, {"0": 0.0, "0.99": 0.99}, ["1", "2", "-0.1", "nan", "inf", "x"]),
    "share": (values.SHARE, {"0": 0.0, "1": 1.0}, ["1.1", "-0.1", "nan"]),
    "seconds": (values.SECONDS, {"0.1": 0.1, "1e7": 1e7}, ["0", "-1", "inf", "1e12", "nan", "x"]),
    "path": (values.PATH, {"a b": "a b"}, ["", " "]),
    "names": (values.NAMES, {"a, b": ("a", "b")}, ["", "a,", "a,,b", "a,a"]),
    "ranks": (values.RANKS, {"4": 4, "2:4": (2, 4)}, ["0", "x", "2:", "4:2", "0:2", "1:2:3", ""]),
    "choice": (named_choice(["int8"]), {"a=b=int8": ("a=b", "int8")}, ["int8", "=int8", "a=int4"]),
    "duration": (
        values.DURATION,
        {"20s": 20.0, "500ms": 0.5, "2m": 120.0, "1.5": 1.5, "1h": 3600.0},
        ["", "s", "0s", "-3s", "nan", "inf", "20 parsecs", "1e300h", "2ss", "5sm"],
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_an_option_takes_what_it_says(name: str) -> None:
    kind, good, bad = TYPES[name]
    command = click.Command("x", params=[click.Option(["--value"], type=kind)])
    for text, value in good.items():
        with command.make_context("x", [f"--value={text}"]) as context:
            found = context.params["value"]
        assert found == value and type(found) is type(value)
    for text in bad:
        with pytest.raises(click.BadParameter) as refused:
            command.make_context("x", [f"--value={text}"])
        assert refused.value.format_message().startswith("Invalid value for '--value': ")


def test_an_option_that_says_several_keys_is_named_once() -> None:
    said = [Option("--folder", ("run", name), name) for name in ("storage_path", "name")]
    settings = read_settings(None, ["run.steps=3"], said)
    assert settings.source_of(("run",)) == "--folder with --set run.steps=3"
