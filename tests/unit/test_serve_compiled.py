"""A compiled dense part gives the scores of the uncompiled one, where it runs at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.errors import ArtifactError
from rayrec.serve import ParityBounds, Predictor, export, open_artifact
from rayrec.serve.compiled import MOST_ROWS, Target, load_compiled
from rayrec.serve.manifest import MANIFEST, Manifest
from tests.unit.serve_worlds import World, a_model, a_world, rows

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler: install g++"
)


def test_code_for_another_torch_or_processor_is_not_run() -> None:
    here = Target.here()
    assert here.misfit() == ""
    assert {"sse2", "asimd"} & set(here.processor)
    assert "compiled for torch 1.0" in replace(here, torch="1.0").misfit()
    more = replace(here, processor=(*here.processor, "warp_drive"))
    assert more.misfit() == "this processor lacks 'warp_drive', for which it was compiled"


def test_what_is_no_compiled_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"compiled.pt2 cannot be loaded.*Export the checkpo"):
        load_compiled(b"no archive", tmp_path / "compiled.pt2")


def rewritten(folder: Path, out: Path, target: Mapping[str, Any]) -> Path:
    """A copy of an artifact that says of its code that it was compiled for another target."""
    shutil.copytree(folder, out)
    body = json.loads((folder / MANIFEST).read_text())
    manifest = Manifest.from_bytes(json.dumps(body).encode(), str(folder))
    assert manifest.compiled is not None
    code = manifest.compiled
    other = replace(manifest, compiled=replace(code, target=replace(code.target, **target)))
    (out / MANIFEST).write_bytes(other.sealed().to_bytes())
    return out


@pytest.mark.slow
@needs_compiler
def test_scores_of_compiled_code_are_those_of_the_model(tmp_path: Path) -> None:
    world: World = a_world(tmp_path, 3)
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    export(world.checkpoint, plain, data=world.data)
    manifest = export(world.checkpoint, compiled, data=world.data, compiled=True)
    assert manifest.compiled is not None and manifest.compiled.file in manifest.files()
    assert manifest.parity == open_artifact(plain).manifest.parity
    ours, theirs = Predictor.load(compiled), Predictor.load(plain)
    assert ours.weights.not_compiled == ""
    assert theirs.weights.not_compiled == "the artifact was exported without"

    for number in (0, 1, 2, MOST_ROWS, MOST_ROWS + 1, 200):
        table = rows(number, number)
        got, wanted = ours.logits(table), theirs.logits(table)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        # few rows do go through the compiled code, and many do not
        assert number <= MOST_ROWS or torch.equal(got, wanted)
    table = rows(30, 8).drop_columns(["click"])
    own = ["user", "seen", "age"]
    user, candidates = table.select(own).to_pylist()[0], table.drop_columns(own)
    torch.testing.assert_close(
        ours.predict_candidates(user, candidates), theirs.predict_candidates(user, candidates)
    )

    # without the recipe, a model of the user's own code; the program is for many rows then
    table = rows(40, 1)
    export(
        world.checkpoint,
        tmp_path / "own",
        model=lambda: a_model(world.schema),
        schema=world.schema,
        bounds=ParityBounds(logit=9),
        compiled=True,
    )
    torch.testing.assert_close(
        Predictor.load(tmp_path / "own").logits(table), theirs.logits(table), rtol=1e-5, atol=1e-5
    )

    # on another machine the artifact is served all the same
    for number, target in enumerate([{"torch": "1.0"}, {"processor": ("warp_drive",)}]):
        folder = rewritten(compiled, tmp_path / f"moved{number}", target)
        moved = Predictor.load(folder)
        assert moved.weights.not_compiled
        assert torch.equal(moved.logits(table), theirs.logits(table))

    (compiled / "compiled.pt2").write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"compiled.pt2"):
        Predictor.load(compiled)


@pytest.mark.slow
def test_compiling_without_a_compiler_ends_before_anything_is_written(tmp_path: Path) -> None:
    world = a_world(tmp_path, 3)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rayrec.cli.main", "export", world.checkpoint, str(out)]
    ran = subprocess.run(
        [*command, "--compile"],
        cwd=ROOT,
        env={**os.environ, "CXX": "/nowhere/c++"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2 and not out.exists()
    (line,) = ran.stderr.strip().splitlines()
    assert "there is no C++ compiler. Install g++" in line
