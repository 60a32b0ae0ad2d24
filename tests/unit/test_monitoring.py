"""deploy/monitoring asks for metrics that a run exports, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rayrec.driver.ray_metrics import METRICS
from tests.watched import exported

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
BOARD = json.loads((FOLDER / "grafana-rayrec.json").read_text())
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
QUERIES = [*(target["expr"] for target in TARGETS), *(rule["expr"] for rule in RULES)]
EXPORTED = {exported(name): metric for name, metric in METRICS.items()}


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


def test_names_in_the_files_are_exported_and_every_metric_is_on_the_board():
    asked = set(re.findall(r"ray_rayrec_\w+", json.dumps(BOARD)))
    assert asked == set(EXPORTED)
    for file in FOLDER.iterdir():
        assert set(re.findall(r"(?:ray_)?rayrec_\w+", file.read_text())) <= set(EXPORTED)


def test_a_legend_shows_only_labels_that_its_query_keeps():
    for target in TARGETS:
        kept = set(re.search(r"by \(([\w, ]+)\)", target["expr"])[1].split(", "))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_the_panels_of_the_board_fill_its_grid_without_overlap():
    cells, rows = set(), 0
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells
        cells |= own
        rows = max(rows, at["y"] + at["h"])
    assert all(panel["targets"] for panel in PANELS)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    # what repeats grows into the empty cells beside it
    (repeated,) = [panel for panel in PANELS if "maxPerRow" in panel]
    assert len(cells) + (24 - repeated["gridPos"]["w"]) * repeated["gridPos"]["h"] == 24 * rows


def test_every_variable_is_known_and_what_repeats_asks_for_its_own_value():
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(?:{)?([a-z]\w*)", json.dumps(BOARD))) - {"labels"}
    assert used == variables == {"datasource", "run", "score"}
    repeats = {item["title"]: item["repeat"] for item in BOARD["panels"] if "repeat" in item}
    assert repeats == {"$score": "score", "Run $run": "run"}
    (score,) = [panel for panel in PANELS if panel.get("repeat") == "score"]
    assert all('score=~"$score"' in target["expr"] for target in score["targets"])


def test_the_options_of_a_panel_are_whole():
    """Grafana's types require these fields, and only its own defaults hide that one is missing."""
    for panel in PANELS:
        if panel["type"] == "timeseries":
            assert set(panel["options"]) == {"tooltip", "legend"}
            assert set(panel["options"]["tooltip"]) == {"mode", "sort"}
            legend = {"showLegend", "displayMode", "placement", "calcs"}
            assert set(panel["options"]["legend"]) == legend
            assert set(panel["fieldConfig"]["defaults"]["custom"]["stacking"]) == {"mode", "group"}


def test_curves_of_several_runs_are_not_stacked_on_each_other():
    row = {}
    for panel in BOARD["panels"]:
        row = panel if panel["type"] == "row" else row
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
        if custom.get("stacking", {}).get("mode") == "normal":
            assert row["repeat"] == "run"


def test_the_line_of_the_board_is_the_limit_of_the_alert():
    (wait,) = [panel for panel in PANELS if panel["title"] == "Waiting for data by rank"]
    limit = wait["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
    (rule,) = [rule for rule in RULES if rule["alert"] == "RayrecWaitsForData"]
    assert f"> {limit})" in rule["expr"] and 0 < limit < 1


def test_prometheus_reads_the_alerts_and_what_ray_lists():
    read = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert [(FOLDER / name).is_file() for name in read["rule_files"]] == [True]
    assert {rule["alert"] for rule in RULES} == {
        "RayrecRunStandsStill",
        "RayrecWaitsForData",
        "RayrecRunFailed",
    }
    (scraped,) = read["scrape_configs"]
    (files,) = scraped["file_sd_configs"]
    assert files["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
