"""Records of what JSON has no word for: keys that are no texts, sets, and classes alike in keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from rayrec.fields.misfit import Misfit
from rayrec.fields.reading import read_record
from rayrec.fields.writing import record_of


class Cell(NamedTuple):
    """A key of two numbers."""

    row: int
    column: int


@dataclass(frozen=True)
class Wide:
    """A class that needs more than `Small` says."""

    step: int
    path: str | None
    seconds: float


@dataclass(frozen=True)
class Small:
    """A class whose keys `Wide` has, too."""

    step: int
    path: str | None


@dataclass(frozen=True)
class Holder:
    """One field of each kind."""

    cells: Mapping[Cell, str] = field(default_factory=dict)
    counts: Mapping[int, Small] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    parts: tuple[Wide | Small | str, ...] = ()


def test_a_record_is_read_as_it_was_written() -> None:
    small = Small(3, None)
    holder = Holder(
        cells={Cell(0, 1): "a", Cell(2, 0): "b"},
        counts={7: small},
        names=frozenset({"y", "x"}),
        parts=(small, Wide(3, "p", 0.5), "text"),
    )
    data = json.loads(json.dumps(record_of(holder)))
    assert data["cells"] == [[[0, 1], "a"], [[2, 0], "b"]] and data["names"] == ["x", "y"]
    assert read_record(Holder, data) == holder
    assert read_record(Holder, record_of(Holder()) | {"names": []}) == Holder()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"cells": {"0": "a"}}, r"cells is \{'0': 'a'\}; it must be a list"),
        ({"cells": [[[0], "a"]]}, r"cells\[0\]\[0\] is \[0\]; it must be a list of 2"),
        ({"counts": [["7", {}]]}, r"counts\[0\]\[0\] is '7'; it must be a whole number"),
        ({"parts": [{"step": 1}]}, r"parts\[0\] has no field 'path'"),
    ],
)
def test_what_is_no_such_record_is_said_with_its_place(data: dict[str, object], says: str) -> None:
    with pytest.raises(Misfit, match=says):
        read_record(Holder, data)
