"""A Grafana board, alerts and a Prometheus configuration for runs with `RayMetrics`.

The board is plain JSON for Grafana's import, with a choice of data source and of runs. Queries take
the largest value over Ray's own labels (node, worker, session), so that a run that was continued is
one curve. Every metric in them is one of `rayrec.watch.metric_names.METRICS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.checks import absolute_path, is_uri
from rayrec.errors import ConfigError
from rayrec.storage import probe_output, write_whole
from rayrec.watch.metric_names import exported

BOARD, ALERTS, SCRAPE = "grafana-rayrec.json", "alerts.yml", "prometheus.yml"
WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's grid has 24 columns


class Query(NamedTuple):
    """A query of PromQL and the legend of its curves."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A picture of the board; `unit` is a name that Grafana knows."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


def _largest(metric: str, *labels: str) -> str:
    return f'max by ({", ".join(("run", *labels))}) ({exported(metric)}{{run=~"$run"}})'


def _curves(metric: str, label: str) -> tuple[Query, ...]:
    return (Query(_largest(metric, label), f"{{{{run}}}} {{{{{label}}}}}"),)


def _rate(metric: str) -> str:
    return f'sum by (run) (rate({exported(metric)}{{run=~"$run"}}[$__rate_interval]))'


def panels() -> tuple[Panel, ...]:
    """The board, row by row, two panels in each."""
    done = f"{_largest('rayrec_step')} / {_largest('rayrec_steps_planned')}"
    run = "{{run}}"
    unsaved = f"{_largest('rayrec_step')} - {_largest('rayrec_checkpoint_step')}"
    return (
        Panel("Loss", "none", (Query(_largest("rayrec_loss"), run),)),
        Panel(
            "Rows per second",
            "short",
            (
                Query(_largest("rayrec_rows_per_second"), f"{run} last window"),
                Query(_rate("rayrec_rows"), f"{run} with evaluation and saving"),
            ),
        ),
        Panel("Scores of training", "none", _curves("rayrec_train_score", "score")),
        Panel("Scores of evaluation", "none", _curves("rayrec_eval_score", "score")),
        Panel("Step by part", "s", _curves("rayrec_step_part_seconds", "part"), stacked=True),
        Panel("Waiting for data by rank", "percentunit", _curves("rayrec_data_wait_ratio", "rank")),
        Panel("Memory by rank", "bytes", _curves("rayrec_memory_bytes", "rank")),
        Panel("Learning rates", "none", _curves("rayrec_learning_rate", "optimizer")),
        Panel(
            "Progress",
            "percentunit",
            (
                Query(done, f"{run} steps done"),
                Query(_largest("rayrec_running"), f"{run} trains"),
                Query(_largest("rayrec_failed"), f"{run} failed"),
            ),
        ),
        Panel("Steps since the newest checkpoint", "none", (Query(unsaved, run),)),
        Panel("Checkpoints per second", "none", (Query(_rate("rayrec_checkpoints"), run),)),
        Panel(
            "Seconds of evaluations and checkpoints",
            "s",
            (
                Query(_largest("rayrec_eval_seconds"), f"{run} evaluation"),
                Query(_largest("rayrec_checkpoint_seconds"), f"{run} checkpoint"),
            ),
        ),
    )


def board() -> dict[str, Any]:
    """The board as Grafana's JSON model."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    runs = f"label_values({exported('rayrec_step')}, run)"
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": source,
            "query": {"query": runs, "refId": "runs"},
            "refresh": 2,  # whenever the time range changes
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        },
    ]
    return {
        "uid": "rayrec-runs",
        "title": "rayrec: runs",
        "tags": ["rayrec"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels())],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
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
    drawing = {
        "fillOpacity": 40 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "showPoints": "auto",
    }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {
            "x": WIDTH * (number % 2),
            "y": HEIGHT * (number // 2),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": drawing}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": targets,
    }


def alerts() -> dict[str, tuple[str, str, str]]:
    """Alert -> (expression, how long it must hold, what it tells)."""
    running = f"max by (run) ({exported('rayrec_running')}) == 1"
    still = f"max by (run) (changes({exported('rayrec_step')}[10m])) == 0"
    waiting = f"max by (run) (avg_over_time({exported('rayrec_data_wait_ratio')}[10m])) > 0.2"
    failed = f"max by (run) ({exported('rayrec_failed')}) == 1"
    return {
        "RayrecRunStandsStill": (
            f"({still}) and ({running})",
            "5m",
            "run {{ $labels.run }} trains and has done no step for 10 minutes",
        ),
        "RayrecWaitsForData": (
            f"({waiting}) and ({running})",
            "10m",
            "a rank of run {{ $labels.run }} waits for data in over a fifth of its time",
        ),
        "RayrecRunFailed": (failed, "0m", "run {{ $labels.run }} ended by an error"),
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
