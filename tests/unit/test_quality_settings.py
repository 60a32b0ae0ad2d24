"""The settings of the quality benchmark name everything that they are about."""

from __future__ import annotations

from pathlib import Path

from benchmarks.quality import PARTS, RANKS, grid, lines_of
from benchmarks.quality_settings import OPTIMIZERS, PLANTED
from rayrec.data.converted import one_table_per_column
from rayrec.driver import RunConfig
from rayrec.layout.kinds import KINDS
from rayrec.spec.optimizers import SPARSE_OPTIMIZERS
from rayrec.spec.wire import WIRE_PRECISIONS


def write_schema(folder: Path) -> None:
    one_table_per_column({"small": 3, "large": 50}, 16).save(folder / "schema.json")


def test_every_optimizer_has_settings_that_it_accepts() -> None:
    assert list(OPTIMIZERS) == list(SPARSE_OPTIMIZERS)
    for name, recipe in OPTIMIZERS.items():
        said = recipe.tables
        assert said.name == name
        assert SPARSE_OPTIMIZERS[name](lr=said.lr, **said.options).lr > 0
    assert OPTIMIZERS["rowwise_adagrad"] == PLANTED


def test_parts_name_every_kind_optimizer_and_type(tmp_path: Path) -> None:
    write_schema(tmp_path)
    trials = {part: make(tmp_path) for part, make in PARTS.items()}
    assert list(trials["kinds"]) == ["one rank", *KINDS]
    assert {trial.ranks for name, trial in trials["kinds"].items() if name in KINDS} == {RANKS}
    assert list(trials["optimizers"]) == list(SPARSE_OPTIMIZERS)
    for name, trial in trials["optimizers"].items():
        assert trial.recipe.tables.name == name
    assert list(trials["wires"]) == list(WIRE_PRECISIONS)
    for name, trial in trials["wires"].items():
        assert trial.options["qcomms_forward"] == trial.options["qcomms_backward"] == name
        assert trial.options["share_tables"] is False and trial.ranks == RANKS
    types = [RunConfig.dense_dtype, trials["dense"]["bfloat16"].options["dense_dtype"]]
    assert types == list(trials["dense"]) and not trials["dense"]["float32"].options


def test_the_grid_cuts_rows_and_columns_and_uses_both_ranks(tmp_path: Path) -> None:
    write_schema(tmp_path)
    plan = grid(tmp_path)
    assert set(plan.tables) == {"t_small", "t_large"}
    for placement in plan.tables.values():
        assert placement.layout.owners == ((0, 1), (1, 0))


def test_tables_show_the_distance_from_the_reference() -> None:
    runs = {
        name: {"auc": 0.83, "regret": regret, "ne_above": 0.01, "seconds": 2.0}
        for name, regret in (("fp32", 0.004), ("int8", 0.0055))
    }
    text = "\n".join(lines_of({"wires": {"of": "10 rows", "date": "2026-01-01", "runs": runs}}))
    assert "| int8 | 0.8300 | 0.0055 | +0.00150 | 0.0100 | 2 |" in text
    heading, rule = text.splitlines()[:2]
    assert heading.count("|") == rule.count("|") == 7
