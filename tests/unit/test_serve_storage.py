"""Exports whose storage refuses: one typed error, nothing left, no artifact that lacks a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.errors import SaveError
from rayrec.serve import export
from tests.limits import files_up_to
from tests.unit.serve_worlds import a_world

PROGRAM = "dense.pt2"


def test_a_disk_without_room_for_the_program_is_no_model_without_one(tmp_path: Path) -> None:
    world = a_world(tmp_path / "world")
    export(world.checkpoint, tmp_path / "whole", data=world.data)
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    assert max(sizes, key=lambda name: sizes[name]) == PROGRAM, "no other file meets the limit"
    out = tmp_path / "out"
    with (
        files_up_to(sizes[PROGRAM] * 3 // 4),
        pytest.raises(SaveError, match=f"cannot write the artifact to {out}: .*too large"),
    ):
        export(world.checkpoint, out, data=world.data)
    assert not out.exists()
    assert export(world.checkpoint, out, data=world.data).program is not None


def test_what_cannot_be_removed_does_not_hide_why_an_export_failed(tmp_path: Path) -> None:
    world = a_world(tmp_path / "world")
    (tmp_path / "out" / "schema.json").mkdir(parents=True)
    with pytest.raises(SaveError, match=r"cannot write the artifact to .*schema\.json"):
        export(world.checkpoint, tmp_path / "out", data=world.data)
