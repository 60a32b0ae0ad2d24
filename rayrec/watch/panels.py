"""The pictures of the Grafana board: what each asks Prometheus for, and how it is drawn.

Queries take the largest value over Ray's own labels (node, worker, session), so that a run that was
continued is one curve. Every metric in them is one of `rayrec.watch.metric_names.METRICS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rayrec.watch.metric_names import exported

# the share of a rank's time in wait for data above which there is an alert
MOST_WAIT = 0.2
STATES = {0: ("ended", "blue"), 1: ("trains", "green"), 2: ("failed", "red"), 3: ("lost", "orange")}


class Query(NamedTuple):
    """A query of PromQL and the legend of its curves."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A picture of the board.

    Attributes:
        unit: a name that Grafana knows.
        about: what the picture means, where the title does not say it.
        width: in columns of Grafana's grid, which has 24.
        least: at which the axis begins; None leaves it to Grafana, as does None for `most`.
        limit: a dashed line, and the axis reaches at least to it.
        states: the value is a key of `STATES`, and the panel shows words.
        repeat: the variable for each of whose values there is such a panel.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    about: str = ""
    width: int = 8
    least: float | None = None
    most: float | None = None
    limit: float | None = None
    stacked: bool = False
    states: bool = False
    repeat: str | None = None

    def field_config(self) -> dict[str, Any]:
        """The unit, the axis and the style, as Grafana's JSON has them."""
        bounds = {"min": self.least, "max": self.most}
        defaults: dict[str, Any] = {name: at for name, at in bounds.items() if at is not None}
        defaults["unit"] = self.unit
        if self.states:
            words = {
                str(value): {"index": value, "text": text, "color": color}
                for value, (text, color) in STATES.items()
            }
            return defaults | {"mappings": [{"type": "value", "options": words}]}
        defaults["custom"] = {
            "fillOpacity": 40 if self.stacked else 0,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "showPoints": "auto",
        }
        if self.limit is not None:
            defaults["custom"] |= {"axisSoftMax": self.limit, "thresholdsStyle": {"mode": "dashed"}}
            steps = [{"color": "green", "value": None}, {"color": "red", "value": self.limit}]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        return defaults

    def options(self) -> dict[str, Any]:
        """The options of Grafana's panel of the type `kind`."""
        if self.states:
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "background",
                "graphMode": "none",
                "textMode": "value_and_name",
                "justifyMode": "auto",
                "orientation": "auto",
                "wideLayout": True,
                "showPercentChange": False,
                "percentChangeColorMode": "standard",
            }
        legend: dict[str, Any] = {"showLegend": True, "displayMode": "list", "placement": "bottom"}
        legend["calcs"] = []
        if self.stacked:
            legend |= {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull"]}
        return {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": legend}

    @property
    def kind(self) -> str:
        """Grafana's type of the panel."""
        return "stat" if self.states else "timeseries"


class Section(NamedTuple):
    """A row of the board: a heading and its panels; with `repeat`, for each value of a variable."""

    title: str
    panels: tuple[Panel, ...]
    repeat: str | None = None


def _selected(metric: str, window: str = "", match: str = "") -> str:
    return f'{exported(metric)}{{run=~"$run"{match}}}{window}'


def _largest(metric: str, *labels: str, match: str = "") -> str:
    return f"max by ({', '.join(('run', *labels))}) ({_selected(metric, match=match)})"


def _by(metric: str, label: str, legend: str) -> tuple[Query, ...]:
    return (Query(_largest(metric, label), legend),)


def _state() -> str:
    """A key of `STATES`; the word of an earlier line goes before that of a later one.

    A run's metrics last for less than half a minute after its end, and points of a long time range
    lie further apart: the newest value of the interval counts.
    """
    newest = "max by (run) (last_over_time({}))"
    running = newest.format(_selected("rayrec_running", "[$__rate_interval]"))
    failed = newest.format(_selected("rayrec_failed", "[$__rate_interval]"))
    trains = f"({_largest('rayrec_running')} == 1)"
    return f"{trains} or 2 * ({failed} == 1) or 3 * ({running} == 1) or {running}"


def sections() -> tuple[Section, ...]:
    """The board from top to bottom: all runs in one picture, their scores, then run by run."""
    return (
        Section("Runs", _of_runs()),
        Section("Scores", (_scores(),)),
        Section("Run $run", _of_one_run(), repeat="run"),
    )


def panels() -> tuple[Panel, ...]:
    """All panels of the board."""
    return tuple(panel for section in sections() for panel in section.panels)


def _of_runs() -> tuple[Panel, ...]:
    run = "{{run}}"
    done = f"{_largest('rayrec_step')} / {_largest('rayrec_steps_planned')}"
    unsaved = f"{_largest('rayrec_step')} - {_largest('rayrec_checkpoint_step')}"
    rate = f"sum by (run) (rate({_selected('rayrec_rows', '[$__rate_interval]')}))"
    # Ray goes on to export the counters of a process that is gone, and forgets its gauges.
    there = f"and {_largest('rayrec_running')}"
    checkpoints = f"sum by (run) ({_selected('rayrec_checkpoints')}) {there}"
    return (
        Panel(
            "State",
            "none",
            (Query(_state(), run),),
            about="Lost: the metrics went away while the run trained, as when its driver is "
            "killed. The time range says how far back this looks.",
            states=True,
        ),
        Panel(
            "Progress",
            "percentunit",
            (Query(done, run),),
            about="Steps done of those planned. A run that recovers goes back to a checkpoint.",
            least=0,
            most=1,
        ),
        Panel("Loss", "none", (Query(_largest("rayrec_loss"), run),)),
        Panel(
            "Rows per second",
            "rowsps",
            (
                Query(_largest("rayrec_rows_per_second"), run),
                Query(f"{rate} {there}", f"{run}, all in all"),
            ),
            about="Of the last window of training; all in all, with the time of evaluations, "
            "checkpoints and recoveries.",
            width=16,
            least=0,
        ),
        Panel(
            "Learning rates",
            "none",
            _by("rayrec_learning_rate", "optimizer", f"{run} {{{{optimizer}}}}"),
        ),
        Panel(
            "Seconds of evaluations and checkpoints",
            "s",
            (
                Query(_largest("rayrec_eval_seconds"), f"{run} evaluation"),
                Query(_largest("rayrec_checkpoint_seconds"), f"{run} checkpoint"),
            ),
            about="How long training stood still for the last of each.",
            least=0,
        ),
        Panel(
            "Checkpoints",
            "none",
            (Query(checkpoints, run),),
            about="Complete ones, of all lives of the run on this cluster.",
            least=0,
        ),
        Panel(
            "Steps since the newest checkpoint",
            "none",
            (Query(unsaved, run),),
            about="What a failure would cost.",
            least=0,
        ),
    )


def _scores() -> Panel:
    match = ',score=~"$score"'
    return Panel(
        "$score",
        "none",
        (
            Query(_largest("rayrec_train_score", "score", match=match), "{{run}} training"),
            Query(_largest("rayrec_eval_score", "score", match=match), "{{run}} evaluation"),
        ),
        repeat="score",
    )


def _of_one_run() -> tuple[Panel, ...]:
    rank = "rank {{rank}}"
    return (
        Panel(
            "Step by part",
            "s",
            _by("rayrec_step_part_seconds", "part", "{{part}}"),
            about="A mean step of rank 0 in the last window.",
            width=10,
            least=0,
            stacked=True,
        ),
        Panel(
            "Waiting for data by rank",
            "percentunit",
            _by("rayrec_data_wait_ratio", "rank", rank),
            about="Share of a rank's time. Above the line for long, there is an alert.",
            width=7,
            least=0,
            limit=MOST_WAIT,
        ),
        Panel(
            "Memory by rank",
            "bytes",
            _by("rayrec_memory_bytes", "rank", rank),
            about="Resident bytes of the rank's process.",
            width=7,
            least=0,
        ),
    )
