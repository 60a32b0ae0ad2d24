"""Artifacts of authors that are not trusted, and signatures that say who the author is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.checks import MAX_LAYERS
from rayrec.errors import ArtifactError, CheckpointError, ConfigError, RayrecError
from rayrec.serve import Manifest, ParityBounds, Predictor, export, open_artifact
from rayrec.serve.artifact import DENSE
from rayrec.serve.chain.version_policy import Verdict
from rayrec.serve.dense_file import dense_bytes, loaded_dense
from rayrec.serve.signing import SigningKey
from tests.unit.bad_texts import distorted, sealed
from tests.unit.documents import ROOT
from tests.unit.published_worlds import assert_equal, published_world
from tests.unit.serve_worlds import World, a_model, a_world, rows

ASKED = rows(12, 5).drop_columns(["click"])
# whatever of this is called has run code of the artifact's
CODE = ("torch.load", "torch.export.load", "torch._inductor.aoti_load_package", "pickle.load")
# two tasks and as few experts as a model can have
FEW = {"tasks": [{"name": "a"}, {"name": "b"}], "shared_experts": 1, "task_experts": 1}
FEW["extraction_layers"] = 1


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return a_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("7f" * 32 + "\n")
    return str(path)


@pytest.fixture(scope="module")
def signed(world, key, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("signed") / "artifact"
    export(world.checkpoint, out, types="fp32", data=world.data, signing_key=key)
    return out


@pytest.fixture
def copied(signed, tmp_path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "copy"))


def changed(folder: Path, **fields: object) -> None:
    """Write another manifest, with a sha256 of its own, as an author would."""
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), str(folder))
    (folder / "manifest.json").write_bytes(replace(manifest, **fields).sealed().to_bytes())


def test_untrusted_scores_are_those_of_trusted_and_no_code_is_loaded(signed, monkeypatch):
    wanted = Predictor.load(signed).predict(ASKED)
    for name in CODE:
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("code of the artifact's was loaded"))
    assert torch.equal(Predictor.load(signed, trusted=False).predict(ASKED), wanted)


def test_the_dense_part_of_an_author_who_is_not_trusted_is_not_unpickled(signed, copied):
    """An artifact of version 1 has a dense part that torch unpickles."""
    old = Path(__file__).parent / "artifact_v1" / "artifact"
    assert Predictor.load(old).step is not None
    with pytest.raises(ArtifactError, match=r"artifact/dense\.pt is of artifact version 1 and"):
        Predictor.load(old, trusted=False)
    content = (old / "dense.pt").read_bytes()
    (copied / DENSE).write_bytes(content)
    stored = replace(open_artifact(signed).manifest.dense, bytes=len(content))
    changed(copied, dense=stored)
    with pytest.raises(ArtifactError, match=f"{DENSE} is of artifact version 1 and"):
        Predictor(open_artifact(copied, verify=False, trusted=False))


def test_a_program_of_an_author_who_is_not_trusted_is_refused_by_its_file(world, tmp_path):
    out = tmp_path / "own"
    own = {"model": lambda: a_model(world.schema), "schema": world.schema}
    export(world.checkpoint, out, types="fp32", bounds=ParityBounds(logit=9), **own)
    wanted = Predictor.load(out).predict(ASKED)
    with pytest.raises(ArtifactError, match=r"own/dense\.pt2 can run code of whoever exported it"):
        Predictor.load(out, trusted=False)
    scores = Predictor.load(out, trusted=False, model=own["model"]).predict(ASKED)
    torch.testing.assert_close(scores, wanted)


def test_compiled_code_of_an_author_who_is_not_trusted_is_left_out(copied, monkeypatch):
    """The recipe scores all requests; the file is not even looked at."""
    from rayrec.serve.compiled import Target
    from rayrec.serve.manifest import StoredCode

    (copied / "compiled.pt2").write_bytes(b"native code")
    with (copied / "manifest.json").open("rb") as file:
        manifest = Manifest.from_bytes(file.read(), str(copied))
    stored = replace(manifest.dense, path="compiled.pt2", bytes=11)
    changed(copied, compiled=StoredCode(stored, Target.here()))
    opened = open_artifact(copied, verify=False, trusted=False)
    assert Predictor(opened).weights.not_compiled == "it is not trusted"
    with pytest.raises(ArtifactError, match=r"compiled\.pt2 cannot be loaded"):
        Predictor(open_artifact(copied, verify=False))


@pytest.mark.parametrize(
    "sizes",
    [
        {"cross_layers": MAX_LAYERS},
        {"dense_layers": [2**31 - 1]},
        {"over_layers": [2**30, 2**30]},
        {"model": "hstu_ranking", "hstu": {"layers": MAX_LAYERS}},
        {"model": "mmoe", **FEW, "shared_experts": MAX_LAYERS},
        {"model": "mmoe", **FEW, "expert_layers": [4] * 10**6},
        {"model": "ple", **FEW, "task_experts": MAX_LAYERS},
        {"model": "ple", **FEW, "extraction_layers": MAX_LAYERS},
        {"model": "mmoe", **FEW, "tasks": [{"name": f"t{n}"} for n in range(10**5)]},
    ],
    ids=lambda sizes: f"{sizes.get('model')} {max(sizes, key=lambda name: len(str(sizes[name])))}",
)
def test_a_recipe_that_is_not_of_the_tensors_takes_no_memory(copied, sizes):
    recipe = open_artifact(copied).manifest.recipe
    changed(copied, recipe={**recipe, "model": "dcn", **sizes})
    with pytest.raises((ArtifactError, CheckpointError)):
        Predictor.load(copied, trusted=False)


@pytest.mark.parametrize("sizes", [{"rows": -1}, {"rows": 1e3}, {"width": 0}, {"width": True}])
def test_a_manifest_with_sizes_that_no_table_has_is_refused(copied, sizes):
    manifest = open_artifact(copied).manifest
    table = manifest.tables[0]
    tables = (replace(table, **sizes), *manifest.tables[1:])
    changed(copied, tables=tables)
    with pytest.raises(ArtifactError, match=r"table 'user' has|tables\[0\]\.\w+ is "):
        Predictor.load(copied, trusted=False)


@pytest.mark.parametrize("path", ["/etc/passwd", "../else", "tables/../../else"])
def test_files_outside_of_an_artifact_are_refused(copied, path):
    changed(copied, dense=replace(open_artifact(copied).manifest.dense, path=path))
    with pytest.raises(ArtifactError, match="lies outside of the artifact"):
        Predictor.load(copied)


@pytest.mark.seeds(range(30))
def test_a_manifest_with_any_two_values_changed_is_one_error(seed, copied):
    rng, text = random.Random(seed), (copied / "manifest.json").read_text()
    for _ in range(20):
        (copied / "manifest.json").write_text(sealed(distorted(text, rng)))
        try:
            Predictor.load(copied, trusted=False).predict(ASKED)
        except RayrecError as error:
            assert "\n" not in str(error)


TENSORS = {
    "w": torch.randn(3, 4),
    "none": torch.empty(0, 3),
    "one": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.randn(5).half(),
    "bf": torch.randn(3, 2).bfloat16().t(),
    "yes": torch.tensor([True, False, True]),
    "n": torch.arange(7, dtype=torch.int64),
}


def test_the_dense_part_is_read_as_it_was_written():
    content = dense_bytes(TENSORS)
    assert content == dense_bytes(dict(reversed(TENSORS.items())))
    got = loaded_dense(content, "here", trusted=False)
    assert set(got) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    with pytest.raises(ArtifactError, match=r"'z' is of type torch\.complex64, which an artifact"):
        dense_bytes({"z": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.seeds(range(60))
def test_any_damage_to_a_dense_part_is_one_error(seed):
    rng, content = random.Random(seed), dense_bytes(TENSORS)
    for _ in range(50):
        cut = bytearray(content[: rng.choice([len(content), rng.randrange(len(content))])])
        for _ in range(rng.randint(0, 3)):
            if cut:
                cut[rng.randrange(min(len(cut), 400))] = rng.randrange(256)
        try:
            loaded_dense(bytes(cut), "here", trusted=False)
        except ArtifactError as error:
            assert str(error).startswith("here ") and "\n" not in str(error)


def test_a_signature_vouches_for_the_manifest(signed, copied, key, tmp_path, monkeypatch):
    wanted = Predictor.load(signed).predict(ASKED)
    assert torch.equal(Predictor.load(signed, signing_key=key).predict(ASKED), wanted)
    monkeypatch.setenv("A_KEY", Path(key).read_text())
    assert Predictor.load(signed, trusted=False, signing_key="env:A_KEY").step == 7

    with pytest.raises(ConfigError, match="verify=False with a signing key"):
        Predictor.load(signed, verify=False, signing_key=key)
    (tmp_path / "other").write_text("80" * 32)
    no_signature = r"manifest\.json\.hmac is no signature of manifest\.json by this key"
    with pytest.raises(ArtifactError, match=no_signature):
        Predictor.load(signed, signing_key=str(tmp_path / "other"))
    # whoever lacks the key can make a whole artifact, and cannot sign it
    changed(copied, step=8)
    assert Predictor.load(copied).step == 8
    with pytest.raises(ArtifactError, match=no_signature):
        Predictor.load(copied, signing_key=key)
    (copied / "manifest.json.hmac").unlink()
    with pytest.raises(ArtifactError, match=r"manifest\.json is not signed"):
        Predictor.load(copied, signing_key=key)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("env:NO_SUCH_KEY", "there is no environment variable 'NO_SUCH_KEY'"),
        ("env:", "there is no environment variable ''"),
        ("/no/such/key", "the signing key cannot be read"),
        ("env:SHORT", "in env:SHORT has 6 bytes, and 32 are needed"),
        ("", "signing"),
    ],
)
def test_a_key_that_is_none_is_refused_and_never_told(place, says, monkeypatch, signed):
    monkeypatch.setenv("SHORT", "hidden\n")
    with pytest.raises(ConfigError, match=says) as caught:
        Predictor.load(signed, signing_key=place)
    assert "hidden" not in str(caught.value)


def test_a_chain_is_followed_where_every_publication_is_signed(tmp_path, key):
    rng, world = random.Random(3), published_world(tmp_path / "chain", 3, ranks=2)
    world.start_ranks(world.plan, SigningKey.read(key))
    world.publish()
    mine = Predictor.follow(world.folder, trusted=False, signing_key=key)
    plain = Predictor.follow(world.folder)
    for _ in range(2):
        world.train(rng)
        world.publish()
        assert mine.refresh() == 1 and plain.refresh() == 1
    assert_equal(mine, plain, ASKED.to_pylist())
    # a whole publication that somebody else wrote is taken by whoever asks for no signature
    for writer in world.writers:
        writer._key = None
    world.train(rng)
    name = world.publish()
    assert plain.refresh() == 1
    step = mine.step
    assert mine.refresh() == 0 and mine.step == step and mine.verdict is Verdict.DAMAGED
    assert f"{name}/publication.json is not signed" in mine.trouble


@pytest.mark.slow
def test_rayrec_serve_asks_for_signature_and_trust(copied, key, tmp_path):
    """The command ends with one line, and does not listen."""
    (tmp_path / "other").write_text("80" * 32)
    command = [sys.executable, "-m", "rayrec.cli.main", "serve", str(copied), "--port", "0"]
    changed(copied, recipe=None)
    (copied / "manifest.json.hmac").unlink()
    text = (copied / "manifest.json").read_bytes()
    found = SigningKey.read(key)
    assert found is not None
    found.sign(copied / "manifest.json", text)
    for options, says in (
        (["--signing-key", str(tmp_path / "other")], "is no signature of manifest.json"),
        (["--signing-key", key, "--untrusted"], "dense.pt2 can run code of whoever exported it"),
    ):
        done = subprocess.run(
            [*command, *options],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode != 0 and says in done.stderr
        assert done.stdout == "" and done.stderr.count("\n") == 1
