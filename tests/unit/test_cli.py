"""`rayrec plan`: the same plan as the planner's; presets, pages, and refusals in one line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayrec.cli.main import main
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import write_synthetic
from rayrec.layout import EmbeddingBagConfig, PoolingType, ShardingPlan, Topology
from rayrec.layout.presets import PRESETS, preset_topology
from rayrec.layout.schema import FeatureSchema
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints, manual_plan
from rayrec.report.plan_page import render_page
from tests.unit.plan_worlds import random_plan

SCHEMA = {
    "label": "clicked",
    "dense": ["age"],
    "features": [
        {"name": "user", "column": "user"},
        {"name": "item", "column": "item"},
        {"name": "seen", "column": "seen"},
    ],
    "tables": [
        {
            "name": "user",
            "num_embeddings": 1_000_000,
            "embedding_dim": 64,
            "pooling": "sum",
            "features": ["user"],
            "data_type": "fp16",
        },
        {
            "name": "item",
            "num_embeddings": 50_000,
            "embedding_dim": 64,
            "pooling": "mean",
            "features": ["item", "seen"],
        },
    ],
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def plan_words(schema: Path, topology: str, out: Path) -> list[str]:
    """The command line of a plan that is written to `out`."""
    return ["plan", "--schema", str(schema), "--topology", topology, "--out", str(out)]


def test_the_plan_written_is_the_planners(
    schema: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text('{"item": {"pooling_factor": 20, "kinds": ["row_wise"]}}')
    out = tmp_path / "plan.json"
    argv = [*plan_words(schema, "a100-80", out), "--ranks", "4", "--constraints", str(limits)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    tables = FeatureSchema.load(schema).tables
    constraints = {"item": ParameterConstraints(pooling_factor=20, kinds=["row_wise"])}
    wanted = EmbeddingShardingPlanner(preset_topology("a100-80", ranks=4), 2048, constraints).plan(
        tables
    )
    found = ShardingPlan.load(out)
    assert found == wanted and found.estimates == wanted.estimates
    assert wanted.report() in shown and "user" in shown
    assert (
        main([*argv, "--diff", str(out)]) == 0 and "The plans are equal." in capsys.readouterr().out
    )


def test_wire_types_and_the_hidden_input_reach_the_prices(schema: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    argv = [*plan_words(schema, "h100", out), "--hosts", "2"]
    steps = []
    for more in (
        [],
        ["--qcomms-forward", "int8"],
        ["--qcomms-forward", "int8", "--qcomms-backward", "bf16"],
        ["--input-hidden", "1"],
    ):
        assert main([*argv, *more]) == 0
        estimates = ShardingPlan.load(out).estimates
        assert estimates is not None
        steps.append(estimates.step_s)
    assert steps[0] > steps[1] > steps[2] and steps[0] > steps[3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--topology", "h1000"], "neither a file nor a preset; the presets are a100-40"),
        (["--ranks", "6", "--hosts", "4"], "6 ranks do not divide evenly over 4 hosts"),
        (["--kinds", "rowwise"], "did you mean row_wise"),
        (["--constraints", "nowhere.json"], "cannot read nowhere.json"),
        (["--schema", "nowhere.json"], "cannot read the schema nowhere.json"),
        (["--batch", "100000000"], "Any one of these makes a plan exist: lower batch_size"),
    ],
)
def test_mistakes_end_in_one_line(
    schema: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--schema", str(schema), "--topology", "h100", *change]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_topology_file_is_used_and_may_not_be_contradicted(
    schema: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "topology.json"
    path.write_text(Topology(hosts=((0,), (1, 2)), memory_bytes=(10**9,) * 3).to_json())
    argv = ["plan", "--schema", str(schema), "--topology", str(path)]
    assert main(argv) == 0 and "on 3 ranks" in capsys.readouterr().out
    assert main([*argv, "--ranks", "4"]) == 2 and "--ranks 4 contradicts" in capsys.readouterr().err
    assert (
        main([*argv, "--reserve", "0.1"]) == 2
        and "--reserve is of presets" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", [*PRESETS, "cpu"])
def test_presets_are_topologies_that_survive_json(name: str) -> None:
    topology = preset_topology(name, hosts=2)
    assert topology.world_size == 16 and Topology.from_json(topology.to_json()) == topology
    assert (
        preset_topology(name, ranks=12).world_size == 12
        and len(preset_topology(name, ranks=12).hosts) == 2
    )
    if name in PRESETS:
        assert topology.memory_bytes[0] == int(PRESETS[name].memory_gb * 1e9 * 0.85)
        assert topology.inter_host_bw < topology.intra_host_bw < topology.memory_bw


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page would load."""

    VOID = frozenset({"meta", "link", "input", "rect", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID or (tag == "rect" and self.get_starttag_text()[-2] != "/"):  # type: ignore[index]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page


@pytest.mark.seeds(range(20))
def test_a_page_is_well_formed_and_loads_nothing(seed: int) -> None:
    plan = random_plan(seed)
    text = render_page(plan, title='a <b> & "c"')
    page = parse(text)
    assert page.loads == ["data:,"] and not re.search(r"https?://", text)
    assert page.counts.get("tr", 0) == 1 + len(plan.tables)


def test_a_page_shows_every_table_rank_and_part() -> None:
    tables = [
        EmbeddingBagConfig(
            1000 * (i + 1), 32, f"table<{i}>", feature_names=[f"f{i}"], pooling=PoolingType.SUM
        )
        for i in range(30)
    ]
    topology = Topology.uniform(2, 4, 10**9)
    planned = render_page(EmbeddingShardingPlanner(topology, 64).plan(tables))
    assert all(f"table&lt;{i}&gt;" in planned for i in range(30)) and "table<0" not in planned
    assert (
        all(f"rank {rank}: " in planned for rank in range(8))
        and "gradients in: " in planned
        and "optimizer state: " in planned
    )
    by_hand = render_page(manual_plan(tables, "row_wise", topology))
    # equal neighbours are one rectangle
    assert "Predicted time" not in by_hand and parse(by_hand).counts["rect"] == 30


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_pooling_factors_are_counted_from_the_data(
    schema: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    from rayrec.cli.profile import measure

    data = tmp_path / "data"
    data.mkdir()
    rows = pa.table(
        {
            "user": [1, 2, None, 4],
            "item": [7, 8, 9, 9],
            "seen": [[1, 2, 3], None, [], [4, 5]],
            "clicked": [0.0] * 4,
        }
    )
    path = data / f"part-0.{suffix}"
    parquet.write_table(rows, path) if suffix == "parquet" else feather.write_feather(
        rows, path, compression="uncompressed"
    )
    features = FeatureSchema.load(schema)
    for where in (data, path):
        found = measure(features, where, step_rows=4096)
        assert {name: m["pooling_factor"] for name, m in found.items()} == {
            "user": 0.75,
            "item": (1 + 5 / 4) / 2,
        }
        assert found["user"]["skew"] == 0 < found["item"]["skew"]  # one id of nine comes twice
    out = tmp_path / "plan.json"
    argv = ["plan", "--schema", str(schema), "--topology", "cpu", "--ranks", "2", "--out", str(out)]
    assert main([*argv, "--profile", str(data)]) == 0
    limits = {
        "user": ParameterConstraints(pooling_factor=0.75),
        "item": ParameterConstraints(**found["item"]),
    }
    wanted = EmbeddingShardingPlanner(preset_topology("cpu", ranks=2), 2048, limits).plan(
        features.tables
    )
    assert ShardingPlan.load(out).estimates == wanted.estimates
    given = tmp_path / "limits.json"
    # what is given stands, also where it is the default
    given.write_text('{"item": {"skew": 0.0}}')
    assert main([*argv, "--profile", str(data), "--constraints", str(given)]) == 0
    limits["item"] = ParameterConstraints(pooling_factor=1.125)
    wanted = EmbeddingShardingPlanner(preset_topology("cpu", ranks=2), 2048, limits).plan(
        features.tables
    )
    assert ShardingPlan.load(out).estimates == wanted.estimates
    assert (
        main([*argv, "--profile", str(tmp_path / "nowhere")]) == 2
        and "no data at" in capsys.readouterr().err
    )
    (data / "README.md").write_text("no data")
    assert main([*argv, "--profile", str(data)]) == 0
    for seen, says in (([{"a": 1}], "has type struct<a: int64>"), (None, "'seen' is missing")):
        wrong = rows.drop_columns("seen")
        wrong = wrong if seen is None else wrong.append_column("seen", [seen * 4])
        parquet.write_table(wrong, tmp_path / "wrong.parquet")
        assert main([*argv, "--profile", str(tmp_path / "wrong.parquet")]) == 2
        assert says in capsys.readouterr().err


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"rayrec \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_table_of_unknown_features_is_refused(schema, capsys):
    raw = json.loads(schema.read_text())
    raw["tables"][0]["features"].append("ghost")
    schema.write_text(json.dumps(raw))
    assert main(["plan", "--schema", str(schema), "--topology", "h100"]) == 2
    assert "names the unknown feature 'ghost'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--html"])
def test_a_file_that_cannot_be_written_is_named(option, schema, capsys):
    argv = ["plan", "--schema", str(schema), "--topology", "h100"]
    assert main([*argv, option, f"{schema}/below"]) == 2
    assert f"cannot write {option} to {schema}/below" in capsys.readouterr().err
    assert main([*argv, option, str(schema)]) == 2
    assert (
        f"{option} {schema} would be written over the file of --schema" in capsys.readouterr().err
    )
    assert json.loads(schema.read_text()) == SCHEMA
    assert main([*argv, "--out", f"{schema}2", "--html", f"{schema}2"]) == 2
    assert not Path(f"{schema}2").exists() and "file of --out" in capsys.readouterr().err


def test_made_data_are_what_the_job_makes(tmp_path, capsys):
    out = tmp_path / "clicks"
    arguments = ["make-data", str(out), "--rows", "3000", "--eval-rows", "500", "--seed", "3"]
    assert main(arguments) == 0
    made = write_synthetic(
        tmp_path / "same", SyntheticConfig(rows_train=3000, rows_eval=500, seed=3)
    )
    assert pq.read_table(out / "train").equals(pq.read_table(made.train))
    assert (out / "truth.json").read_text() == made.truth.read_text()
    assert main(arguments) == 2 and "already holds" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


def test_data_are_made_in_a_folder_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    for folder, says in (
        ("mine", "holds 'notes.txt', which is no part of a data set"),
        ("s3://", "s3:// is no local folder"),
        ("s3://bucket/clicks", "is no local folder"),
        ("s3:/bucket", "a folder called 's3:'. Write s3://bucket for a URI"),
    ):
        assert main(["make-data", folder, "--rows", "9", "--eval-rows", "2"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]
