"""Options take what they say and name themselves where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayrec import arguments
from rayrec.command import Parser

TYPES: dict[str, tuple[Callable[[str], Any], dict[str, Any], list[str]]] = {
    "whole": (arguments.whole(), {"1": 1, "12": 12}, ["0", "-1", "1.5", "x", "", "nan", "1e3"]),
    "between": (arguments.whole(2, 3), {"2": 2, "3": 3}, ["1", "4"]),
    "seed": (arguments.seed, {"0": 0, str(2**63 - 1): 2**63 - 1}, ["-1", str(2**63), "0.5"]),
    "positive": (arguments.positive, {"0.5": 0.5}, ["0", "-1", "nan", "inf", "x", ""]),
    "rate": (arguments.rate, {"0": 0.0, "1e-3": 1e-3}, ["-0.1", "nan", "inf", "-inf"]),
    "fraction": (arguments.fraction, {"0": 0.0, "0.99": 0.99}, ["1", "-0.1", "nan"]),
    "share": (arguments.share, {"0": 0.0, "1": 1.0}, ["1.1", "-0.1", "nan"]),
    "seconds": (arguments.seconds, {"0.1": 0.1, "1e7": 1e7}, ["0", "-1", "inf", "1e12"]),
    "path": (arguments.path, {"a b": "a b"}, ["", " "]),
}


@pytest.mark.parametrize("name", TYPES)
def test_an_option_takes_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, good, bad = TYPES[name]
    parser = Parser(prog="x")
    parser.add_argument("--value", type=kind)
    for text, value in good.items():
        found = parser.parse_args([f"--value={text}"]).value
        assert found == value and type(found) is type(value)
    for text in bad:
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([f"--value={text}"])
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert error.startswith(f"error: argument --value: {text!r} must be a ")
