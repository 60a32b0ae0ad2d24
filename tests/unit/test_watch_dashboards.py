"""The Grafana board and the alerts ask for metrics that a run exports, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.errors import ConfigError
from rayrec.watch import dashboards, panels, write_dashboards
from rayrec.watch.metric_names import METRICS, exported

EXPORTED = {exported(name): metric for name, metric in METRICS.items()}
QUERIES = [
    *(query.expression for panel in panels.panels() for query in panel.queries),
    *(expression for expression, _, _ in dashboards.alerts().values()),
]


def plain_query(expression: str) -> str:
    """A query with Grafana's variables filled in, as Prometheus gets it."""
    for variable, value in (("$__rate_interval", "1m"), ("$run", ".*"), ("$score", "auc")):
        expression = expression.replace(variable, value)
    return expression


def nodes(expression) -> Iterator[object]:
    """An expression of promql_parser and all expressions within it."""
    yield expression
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        inner = getattr(expression, name, None)
        if inner is not None:
            yield from nodes(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from nodes(argument)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_parses_and_asks_for_exported_metrics_by_their_labels(query: str):
    promql = pytest.importorskip("promql_parser")
    inner = list(nodes(promql.parse(plain_query(query))))
    selected = [node for node in inner if isinstance(node, promql.VectorSelector)]
    assert selected, "a query without a metric shows nothing"
    for node in selected:
        assert node.name in EXPORTED
        labels = {"run", *EXPORTED[node.name].labels}
        assert {matcher.name for matcher in node.matchers.matchers} <= labels
    for node in inner:
        if isinstance(node, promql.AggregateExpr):
            (metric,) = {n.name for n in nodes(node) if isinstance(n, promql.VectorSelector)}
            grouped = set(node.modifier.labels)
            assert "run" in grouped and grouped <= {"run", *EXPORTED[metric].labels}


def test_names_in_queries_are_exported_and_every_metric_is_on_the_board():
    asked = set(re.findall(r"ray_rayrec_\w+", json.dumps(dashboards.board())))
    assert asked == set(EXPORTED)
    assert set(re.findall(r"ray_rayrec_\w+", " ".join(QUERIES))) == set(EXPORTED)


def test_a_legend_shows_only_labels_that_its_query_keeps():
    for panel in panels.panels():
        for query in panel.queries:
            kept = set(re.search(r"by \(([\w, ]+)\)", query.expression)[1].split(", "))
            assert set(re.findall(r"{{(\w+)}}", query.legend)) <= kept


def test_the_panels_of_the_board_fill_its_grid_without_overlap():
    board = dashboards.board()
    cells, rows = set(), 0
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells
        cells |= own
        rows = max(rows, at["y"] + at["h"])
        if panel["type"] != "row":
            assert panel["targets"] and all(target["expr"] for target in panel["targets"])
    ids = {panel["id"] for panel in board["panels"]}
    assert len(ids) == len(board["panels"]) == len(panels.panels()) + len(panels.sections())
    # what repeats grows into the empty cells beside it
    (repeated,) = [panel for panel in board["panels"] if "maxPerRow" in panel]
    assert len(cells) + (24 - repeated["gridPos"]["w"]) * repeated["gridPos"]["h"] == 24 * rows


def test_every_variable_is_known_and_what_repeats_asks_for_its_own_value():
    board = dashboards.board()
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$(?:{)?([a-z]\w*)", json.dumps(board))) - {"labels"}
    assert used == variables == {"datasource", "run", "score"}
    repeats = {item["title"]: item["repeat"] for item in board["panels"] if "repeat" in item}
    assert repeats == {"$score": "score", "Run $run": "run"}
    (score,) = [panel for panel in panels.panels() if panel.repeat == "score"]
    assert all('score=~"$score"' in query.expression for query in score.queries)


def test_the_options_of_a_panel_are_whole():
    """Grafana's types require these fields, and only its own defaults hide that one is missing."""
    for panel in dashboards.board()["panels"]:
        if panel["type"] == "timeseries":
            assert set(panel["options"]) == {"tooltip", "legend"}
            assert set(panel["options"]["tooltip"]) == {"mode", "sort"}
            legend = {"showLegend", "displayMode", "placement", "calcs"}
            assert set(panel["options"]["legend"]) == legend
            assert set(panel["fieldConfig"]["defaults"]["custom"]["stacking"]) == {"mode", "group"}


def test_curves_of_several_runs_are_not_stacked_on_each_other():
    for section in panels.sections():
        for panel in section.panels:
            assert not panel.stacked or section.repeat == "run"


def test_the_files_are_written_and_written_anew(tmp_path: Path):
    for _ in range(2):
        paths = write_dashboards(tmp_path / "new" / "boards")
        assert sorted(Path(p).name for p in paths) == [
            "alerts.yml",
            "grafana-rayrec.json",
            "prometheus.yml",
        ]
        assert json.loads((tmp_path / "new/boards/grafana-rayrec.json").read_text())["panels"]
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((tmp_path / "new/boards/alerts.yml").read_text())["groups"][0]["rules"]
    assert {rule["alert"]: rule["expr"] for rule in rules} == {
        name: expression for name, (expression, _, _) in dashboards.alerts().items()
    }
    scrape = yaml.safe_load((tmp_path / "new/boards/prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write dashboards to .*file/a/"):
        write_dashboards(tmp_path / "file" / "a")
    with pytest.raises(ConfigError, match="'s3://b/c' is a URI"):
        write_dashboards("s3://b/c")
