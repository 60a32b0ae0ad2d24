"""A Grafana board, alerts and a Prometheus configuration for runs with `RayMetrics`.

The board is plain JSON for Grafana's import, with a choice of data source, of runs and of scores.
What is on it stands in `rayrec.watch.panels`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayrec.checks import absolute_path, is_uri
from rayrec.errors import ConfigError
from rayrec.storage import probe_output, write_whole
from rayrec.watch.metric_names import exported
from rayrec.watch.panels import MOST_WAIT, Panel, Section, sections

BOARD, ALERTS, SCRAPE = "grafana-rayrec.json", "alerts.yml", "prometheus.yml"
WIDTH, HEIGHT = 24, 8  # of the grid that Grafana has, in columns; of a panel


def board() -> dict[str, Any]:
    """The board as Grafana's JSON model."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    runs = f"label_values({exported('rayrec_step')}, run)"
    # a score may be there of training or of evaluation alone
    either = f'{{__name__=~"{exported("rayrec_train_score")}|{exported("rayrec_eval_score")}"'
    scores = f'label_values({either},run=~"$run"}}, score)'
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _choice("run", "Runs", runs, source),
        _choice("score", "Scores", scores, source),
    ]
    return {
        "uid": "rayrec-runs",
        "title": "rayrec: runs",
        "tags": ["rayrec"],
        "schemaVersion": 39,
        "editable": True,
        # one line through all panels under the pointer
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": _laid_out(source),
    }


def _choice(name: str, label: str, query: str, source: dict[str, str]) -> dict[str, Any]:
    """A variable with one, several or all values of a label of the time range."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": source,
        "query": {"query": query, "refId": f"{name}s"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,  # by the alphabet
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _laid_out(source: dict[str, str]) -> list[dict[str, Any]]:
    """Headings and panels, from left to right and from top to bottom."""
    drawn: list[dict[str, Any]] = []
    y = 0
    for section in sections():
        heading = _heading(section) | {"gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        drawn.append({"id": len(drawn) + 1, **heading})
        x, y = 0, y + 1
        for panel in section.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            at = {"x": x, "y": y, "w": panel.width, "h": HEIGHT}
            drawn.append({"id": len(drawn) + 1, "gridPos": at, **_panel(panel, source)})
            x += panel.width
        y += HEIGHT
    return drawn


def _heading(section: Section) -> dict[str, Any]:
    heading = {"type": "row", "title": section.title, "collapsed": False, "panels": []}
    return heading | ({"repeat": section.repeat} if section.repeat else {})


def _panel(panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    targets = []
    for letter, query in zip("ABC", panel.queries, strict=False):
        targets.append(
            {
                "refId": letter,
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
        )
    drawn: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "fieldConfig": {"defaults": panel.field_config(), "overrides": []},
        "options": panel.options(),
        "targets": targets,
    }
    if panel.repeat:
        side_by_side = {"repeatDirection": "h", "maxPerRow": WIDTH // panel.width}
        drawn |= {"repeat": panel.repeat, **side_by_side}
    return drawn


def alerts() -> dict[str, tuple[str, str, str]]:
    """Alert -> (expression, how long it must hold, what it tells)."""
    running = f"max by (run) ({exported('rayrec_running')}) == 1"
    still = f"max by (run) (changes({exported('rayrec_step')}[5m])) == 0"
    wait = f"avg_over_time({exported('rayrec_data_wait_ratio')}[10m])"
    # The metrics of a failed run last for 20 s, and an Alertmanager waits for longer than that
    # before it tells of an alert.
    failed = f"max by (run) (max_over_time({exported('rayrec_failed')}[15m])) == 1"
    return {
        "RayrecRunStandsStill": (
            f"({still}) and ({running})",
            "10m",
            "run {{ $labels.run }} trains and has done no step for 10 minutes",
        ),
        "RayrecWaitsForData": (
            f"(max by (run) ({wait}) > {MOST_WAIT}) and ({running})",
            "10m",
            "a rank of run {{ $labels.run }} waits for data in over a fifth of its time",
        ),
        "RayrecRunFailed": (
            f"({failed}) unless ({running})",
            "0m",
            "run {{ $labels.run }} ended by an error within the last 15 minutes",
        ),
    }


def write_dashboards(out: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the board, the alerts and a configuration of Prometheus into a folder.

    Args:
        out: local folder, made if need be; its files of the same names are written anew.
    Returns:
        the paths of the files.
    Raises:
        ConfigError: the folder cannot be written to.
    """
    if is_uri(os.fspath(out)):
        raise ConfigError(f"dashboards go to a local folder, and {os.fspath(out)!r} is a URI.")
    folder = absolute_path("the folder of the dashboards is", out)
    texts = {
        BOARD: json.dumps(board(), indent=2) + "\n",
        ALERTS: _alerts_text(),
        SCRAPE: _SCRAPE_TEXT,
    }
    for name in texts:
        probe_output("dashboards", f"{folder}/{name}")
    for name, text in texts.items():
        write_whole("dashboards", f"{folder}/{name}", text)
    return tuple(str(Path(folder) / name) for name in texts)


def _alerts_text() -> str:
    lines: Sequence[str] = ["groups:", "  - name: rayrec", "    rules:"]
    for name, (expression, held, tells) in alerts().items():
        lines = [
            *lines,
            f"      - alert: {name}",
            f"        expr: {json.dumps(expression)}",
            f"        for: {held}",
            "        annotations:",
            f"          summary: {json.dumps(tells)}",
        ]
    return "\n".join(lines) + "\n"


_SCRAPE_TEXT = """\
# Prometheus for the runs of a Ray cluster: start it on the head node with
#   prometheus --config.file=prometheus.yml
# Ray keeps the file below, in which it lists the metrics port of every node of the cluster.
# A cluster with another --temp-dir has that folder in place of /tmp/ray.
# Then let Grafana import grafana-rayrec.json with this Prometheus as its data source.
global:
  scrape_interval: 10s
  evaluation_interval: 10s
rule_files:
  - alerts.yml
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files:
          - /tmp/ray/prom_metrics_service_discovery.json
"""
