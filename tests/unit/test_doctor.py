"""The table doctor finds what was planted, with exact counts, whatever ranks and plan wrote it."""

from __future__ import annotations

import html
import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayrec.checkpoint import CheckpointManager, TableReader, load_table, read_manifest
from rayrec.cli.main import main
from rayrec.doctor import DoctorReport, TableHealth, examine
from rayrec.doctor.doctor_page import render_doctor_page
from rayrec.doctor.first_rows import FirstRows
from rayrec.doctor.tallies import LARGEST, Float32Histogram, LargestValues
from rayrec.dynamic.first_values import first_values
from rayrec.errors import ArtifactError, ConfigError, DamagedCheckpointError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig
from rayrec.layout.tables import DataType
from rayrec.modules.init import table_values
from rayrec.modules.names import DTYPES
from rayrec.recipe import INIT_BOUND, ModelRecipe
from tests.unit.chain_worlds import save_chain
from tests.unit.checkpoint_worlds import Truth, make_truth, random_plan, random_truths, save_world
from tests.unit.serve_worlds import a_schema, a_world, an_artifact

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SEED = 3


def by_name(report: DoctorReport) -> dict[str, TableHealth]:
    return {table.name: table for table in report.tables}


def kinds_of(report: DoctorReport, table: str) -> set[str]:
    return {one.kind for one in report.findings if one.table == table}


def planted(
    folder: Path, rng: random.Random, data_type: DataType = DataType.FP32, reached: bool = False
) -> Path:
    """A checkpoint of the tables of `a_schema`, with faults in rows of known numbers.

    Args:
        reached: gradients have reached the rows of the frozen table.
    """
    recipe = ModelRecipe(model="dlrm", schema=a_schema().to_json())
    truths = []
    for table in a_schema().tables:
        config = EmbeddingBagConfig(
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            name=table.name,
            feature_names=list(table.feature_names),
            data_type=data_type,
            weight_init_min=-INIT_BOUND,
            weight_init_max=INIT_BOUND,
        )
        spans = range(config.num_embeddings), range(config.embedding_dim)
        weight = table_values(SEED, config, *spans).to(DTYPES[data_type])
        squares = torch.zeros(weight.shape, dtype=torch.float64)
        if table.name == "item":  # 60 rows
            squares[:45] = 1.0  # 15 rows are dead
            weight[:42] += 0.25  # 3 rows are unmoved
            weight[3], weight[4, 2], weight[5] = math.nan, math.nan, 0.0
            weight[6, 1], weight[7] = -math.inf, 3e4
            squares[8] = 20.0  # of 64, the 44 others have 1 each
            squares[9], squares[9, 0] = 8 / 7, 0.0
        if table.name == "user":
            squares += reached
        if table.name == "words":  # 30 rows, into which 30 buckets are hashed
            squares[:20] = 1.0
            weight[:20] *= 0.5
        truths.append(Truth(config, rng.choice(["row", "element"]), weight, squares))
    path = folder / "step-00000007"
    save_world(
        str(path),
        truths,
        random_plan(rng, truths, rng.randint(1, 3)),
        extras=recipe.to_extras(),
        cursor={"seed": SEED},
        optimizers={one.config.name: {"name": "rowwise_adagrad", "lr": 0.1} for one in truths},
        batch_bytes=rng.choice([200, 1000, 1 << 20]),
    )
    return path


@pytest.mark.seeds(range(40))
def test_planted_faults_are_found_with_exact_counts(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    reached = seed % 2 == 0
    report = examine(planted(tmp_path, rng, rng.choice(list(DataType)), reached))
    tables = by_name(report)
    item = tables["item"]
    assert (item.rows, item.in_use, item.dead_rows, item.unmoved_rows) == (60, 60, 15, 3)
    assert item.first_rows == 18
    assert (item.nan_rows, item.infinite_rows, item.zero_rows, item.huge_rows) == (2, 1, 1, 1)
    assert item.examples["NaN rows"] == [3, 4] and item.examples["infinite rows"] == [6]
    assert item.examples["zero rows"] == [5] and item.examples["huge rows"] == [7]
    assert item.hottest_id == 8 and item.hottest_1 == pytest.approx(20 / 64)
    assert item.hottest_10 == pytest.approx(29 / 64) and item.hottest_100 == pytest.approx(1)
    assert item.norm_max == pytest.approx(3e4 * 8**0.5, rel=1e-2)
    assert kinds_of(report, "item") == {
        "NaN rows", "infinite rows", "zero rows", "huge rows", "unmoved rows", "hot id",
    }  # fmt: skip
    user, words = tables["user"], tables["words"]
    dead = 0 if reached else 50
    assert (user.first_rows, user.dead_rows, user.unmoved_rows) == (50, dead, 50 - dead)
    assert user.hottest_1 == (0.02 if reached else None)
    # without a dead row all buckets are used
    assert kinds_of(report, "user") == {"frozen table"} | ({"collisions"} if reached else set())
    assert (words.dead_rows, words.first_rows, words.unmoved_rows) == (10, 10, 0)
    values = math.log(10 / 30) / math.log(29 / 30)
    assert words.distinct_values == pytest.approx(values)
    assert words.collided == pytest.approx(1 - (29 / 30) ** (values - 1))
    assert kinds_of(report, "words") == {"collisions"}
    assert [one.is_grave for one in report.findings] == [True] * 3 + [False] * (5 + reached)


def test_a_touched_row_is_as_it_began_only_if_all_of_its_columns_are() -> None:
    table = EmbeddingBagConfig(3000, 20, name="t", feature_names=["f"])
    dynamic = replace(table, dynamic=DynamicConfig())
    names = torch.arange(2000, 2900)
    static = table_values(SEED, table, range(2000, 2900), range(20))
    ids = names * 7919 - 10**9
    by_id = first_values(SEED, dynamic, ids.numpy(), range(20))
    for config, named, weight in ((table, names, static), (dynamic, ids, by_id)):
        first = FirstRows(SEED, config)
        assert first.match(named, weight, None).all()
        changed = weight.clone()
        changed[100, 15] += 1e-3
        changed[200, 3] += 1e-3
        for untouched in (None, torch.zeros(900, dtype=torch.bool)):
            found = (~first.match(named, changed, untouched)).nonzero()[:, 0]
            assert found.tolist() == [100, 200]


@pytest.mark.seeds(range(60))
def test_numbers_are_those_of_whole_tables(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    truths = random_truths(rng)
    path = str(tmp_path / "step-00000007")
    plan = random_plan(rng, truths, rng.randint(1, 3))
    save_world(path, truths, plan, batch_bytes=rng.choice([200, 1000, 1 << 20]))
    tables = by_name(examine(path))
    reader = TableReader(path, read_manifest(path))
    for truth in truths:
        found, weight = tables[truth.config.name], truth.weight.float()
        norms = weight.norm(dim=1)
        assert found.norm_max == pytest.approx(float(norms.max()), rel=1e-6)
        median = float(norms.sort().values[len(norms) // 2])
        assert found.norm_median is not None and found.norm_median <= median * 1.000001
        assert median < found.norm_median * 1.126
        assert sum(found.octaves.values()) == len(norms) == found.in_use
        assert found.dead_rows == (None if truth.state == "none" else 0)
        # parts of rows, joined over column blocks, are the table as a restore reads it
        whole = load_table(path, truth.config.name)
        parts = list(reader.parts(truth.config.name))
        assert [row for rows, _ in parts for row in rows] == whole["row"].to_pylist()
        for name in parts[0][1]:
            got = torch.cat([data[name] for _, data in parts]).float()
            wanted = torch.from_numpy(np.array(whole[name].to_pylist(), np.float32))
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


@pytest.mark.seeds(range(20))
def test_an_increment_is_examined_as_the_whole_of_it(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    truths = random_truths(rng)
    manager = CheckpointManager(str(tmp_path))
    save_chain(rng, manager, truths, random_plan(rng, truths, 2), 3)
    for step in manager.steps():
        for name, found in by_name(examine(manager.path(step))).items():
            table = load_table(manager.path(step), name)
            weight = torch.tensor(table["weight"].to_pylist())
            assert found.norm_max == pytest.approx(float(weight.norm(dim=1).max()), rel=1e-6)


@pytest.mark.parametrize("dead", [10, 60])
def test_rows_that_began_otherwise_are_not_told_as_trained(tmp_path: Path, dead: int) -> None:
    path = planted(tmp_path, random.Random(0))
    manifest = json.loads((path / "manifest.json").read_text())
    tables = [one for one in a_schema().tables if one.name == "item"]
    recipe = ModelRecipe(model="dlrm", schema=a_schema().to_json(), init_bound=0.25)
    truth = make_truth(random.Random(0), "item", 60, tables[0].embedding_dim, "row")
    truth.squares[:dead] = 0
    other = str(tmp_path / "step-00000008")
    cursor = manifest["cursor"]
    plan = random_plan(random.Random(0), [truth], 1)
    save_world(other, [truth], plan, step=8, extras=recipe.to_extras(), cursor=cursor)
    report = examine(other)
    assert ("frozen table" in kinds_of(report, "item")) == (dead == 60)
    item = by_name(report)["item"]
    assert item.dead_rows == dead and item.first_rows is None and item.unmoved_rows is None
    assert "init_from" in item.not_told["first values"]


def test_an_artifact_tells_of_its_rows_and_says_what_it_does_not_hold(tmp_path: Path) -> None:
    report = examine(an_artifact(tmp_path))
    checkpoint = by_name(examine(tmp_path / "step-00000007"))
    assert report.kind == "artifact" and report.parity["max_logit_error"] < 1e-5
    for name, table in by_name(report).items():
        for field in ("rows", "width", "in_use", "zero_rows", "norm_max", "octaves", "error_int8"):
            assert getattr(table, field) == getattr(checkpoint[name], field)
        assert table.dead_rows is None and "no optimizer state" in table.not_told["dead rows"]


def test_narrower_types_are_off_by_what_an_export_loses(tmp_path: Path) -> None:
    world = a_world(tmp_path)
    for dtype in ("fp16", "int8", "int4"):
        out = tmp_path / dtype
        assert main(["export", world.checkpoint, str(out), "--dtype", dtype]) in (0, 2)
    exact = by_name(examine(world.checkpoint))
    for dtype in ("fp16", "int8"):
        packed = by_name(examine(tmp_path / dtype))
        for name, table in packed.items():
            assert table.data_type == dtype
            wanted, got = exact[name].norm_max, table.norm_max
            assert wanted is not None and got is not None
            assert abs(got - wanted) < 0.02 * wanted
            assert getattr(table, f"error_{dtype}") is None
    for name, table in exact.items():
        weight = torch.tensor(load_table(world.checkpoint, name)["weight"].to_pylist())
        off = (weight.half().float() - weight).norm(dim=1) / weight.norm(dim=1)
        assert table.error_fp16 == pytest.approx(float(off.mean()), rel=1e-4)
        assert table.error_int8 and table.error_int4
        assert table.error_fp16 < table.error_int8 < table.error_int4


@pytest.mark.seeds(range(40))
def test_tallies_are_those_of_all_values_at_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # no two are equal, since the names of equal values may come in any order
    values = torch.randperm(1_000_000, generator=generator)[:997] * 10 ** float(seed % 9 - 10)
    names = torch.randperm(997, generator=generator)
    histogram, largest = Float32Histogram(), LargestValues()
    size = 50 + seed % 200
    for part in range(0, 997, size):
        histogram.add(values[part : part + size])
        largest.add(values[part : part + size], names[part : part + size])
    order = values.argsort(descending=True)[:LARGEST]
    assert largest.names.tolist() == names[order].tolist()
    for count in (1, 10, 100):
        share = float(values[order[:count]].sum() / values.double().sum())
        assert largest.share(count) == pytest.approx(share, rel=1e-5)
    limit = float(values.median()) * 1.7
    above, begins = histogram.from_about(limit)
    assert begins <= limit < begins * 1.126 and above == int((values >= begins).sum())
    assert Float32Histogram().quantile(0.5) is None and LargestValues().share(1) is None


def test_the_command_prints_and_writes_text_json_arrow_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planted(tmp_path, random.Random(1))
    page, arrow = tmp_path / "out" / "page.html", tmp_path / "out" / "tables.arrow"
    # the folder of a run stands for its newest checkpoint
    assert main(["doctor", str(tmp_path), "--html", str(page), "--arrow", str(arrow)]) == 0
    told = capsys.readouterr().out
    assert f"{path}: checkpoint of step 7, 3 tables of 140 rows, 8 findings" in told
    assert "! item: NaN rows: 2 of 60 rows hold a NaN (such as rows 3, 4)" in told
    assert "not told:" in told and told.endswith(f"page: {page}\ntable: {arrow}\n")
    assert main(["doctor", f"{tmp_path}@latest", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    table = pa.ipc.open_file(arrow).read_all()
    assert [one["nan_rows"] for one in said["tables"]] == table["nan_rows"].to_pylist()
    assert table["findings"].to_pylist()[0] == ["frozen table"]
    text = page.read_text()
    assert "src=" not in text and "http" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "kind", ["nothing", "file", "shard", "dense", "artifact table", "artifact dense", "manifest"]
)
def test_wrong_paths_and_damaged_files_are_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, error = tmp_path / "nowhere", ConfigError
    if kind == "file":
        path = tmp_path / "file"
        path.write_text("no checkpoint")
    elif kind.startswith("artifact"):
        path, error = an_artifact(tmp_path), ArtifactError
        spoil(next(path.glob("tables/*.arrow" if kind.endswith("table") else "dense.*")))
    elif kind != "nothing":
        path, error = planted(tmp_path, random.Random(2)), DamagedCheckpointError
        files = {"manifest": "manifest.json", "dense": "dense.pt", "shard": "tables/item/*"}
        spoil(next(path.glob(files[kind])))
    with pytest.raises(error, match=re.escape(str(path))):
        examine(path)
    assert main(["doctor", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page_without_errors(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    probe = """<script>addEventListener("load", () => {
      const box = document.getElementById("filter"); box.value = "words";
      box.dispatchEvent(new Event("input"));
      document.body.dataset.left = [...document.querySelectorAll("tbody tr")]
        .filter(row => !row.hidden).map(row => row.cells[0].innerText).join();
      document.body.dataset.bars = document.querySelectorAll("svg rect").length;
      document.body.dataset.wide = document.body.scrollWidth > innerWidth;
    })</script>"""
    text = render_doctor_page(examine(planted(tmp_path, random.Random(3))))
    page.write_text(text.replace("<head>", f"<head>{probe}"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--window-size=1400,900", f"file://{page}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    (body,) = re.findall(r"<body ([^>]*)>", done.stdout)
    seen = {name: html.unescape(v) for name, v in re.findall(r'data-(\w+)="([^"]*)"', body)}
    assert seen["left"].startswith("words,2") and int(seen["bars"]) > 6
    assert seen["wide"] == "false"
