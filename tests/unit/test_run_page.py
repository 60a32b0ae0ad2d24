"""The page of runs: one file that needs nothing else, with the numbers of the events in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from rayrec.errors import ConfigError, InputError, TrainingFailed
from rayrec.layout import KINDS
from rayrec.observe.times import STEP_PARTS
from rayrec.report.bars import stacks
from rayrec.report.charts import COLORS, Chart, Series, draw
from rayrec.report.elements import beside
from rayrec.report.plan_page import TIME_PARTS
from rayrec.report.scales import thinned, ticks, value_range
from rayrec.train.events import Saved
from rayrec.watch import EventLog, read_events, write_run_page
from rayrec.watch.run_page import run_names
from tests.watched import info, report, tell

VOID = {"meta", "link", "input", "line", "rect", "path", "polyline", "polygon", "circle"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """The elements of a page; every element must be closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag


def curves(text: str, title: str) -> list[dict]:
    """The numbers that the script gets for a chart."""
    (found,) = re.findall(
        rf"<figcaption>{re.escape(title)}(?: <small>[^<]*</small>)?</figcaption>.*?"
        r'<script type="application/json">(.*?)</script>',
        text,
    )
    return json.loads(found)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a failure that was continued, one that was stopped, and one with an odd name."""
    folder = tmp_path_factory.mktemp("runs")
    error = TrainingFailed("rank 1 of 2 failed: no space", 1, "10.0.0.2", "OSError: no space")
    tell(EventLog(folder / "a"), 1000, until=500, error=error)
    tell(EventLog(folder / "a"), 1000, first=400)
    tell(EventLog(folder / "b"), 1000, until=600, name='</script><b> & "b"', rate=0.6, ranks=8)
    tell(EventLog(folder / "c"), 1000, name="c", rate=0.4)
    return [folder / name for name in "abc"]


@pytest.fixture(scope="module")
def page(three: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "three.html"
    assert write_run_page(three, out) == str(out)
    return out.read_text()


def test_a_page_is_whole_and_asks_for_nothing_from_elsewhere(page: str):
    elements = Page(page).elements
    for tag, attributes in elements:
        assert tag not in ("img", "iframe", "object") and "src" not in attributes
        assert attributes.get("href") in (None, "data:,")
    assert "http://" not in page and "https://" not in page and "url(" not in page
    assert "<b> &amp;" not in page and '</script><b> & "b"' not in page


def test_the_curves_are_those_of_the_events(page: str, three: list[Path]):
    first, _, third = curves(page, "Loss")
    steps = list(range(50, 1001, 50))
    assert first["steps"] == steps and third["steps"] == steps
    assert first["values"] == [float(f"{report(step).loss:.6g}") for step in steps]
    assert third["values"] == [float(f"{report(step, 0.4).loss:.6g}") for step in steps]
    auc = {curve["name"]: curve for curve in curves(page, "Score: auc")}
    assert auc["a, evaluation"]["steps"] == [200, 400, 600, 800, 1000]
    assert len(auc["a, training"]["steps"]) == 20
    assert {"a, training", "c, training"} <= {c["name"] for c in curves(page, "Score: click/auc")}
    (fullest, *_) = curves(page, "Memory, fullest rank and the range of all")
    assert fullest["values"] == [2.1e9] * 20
    assert curves(page, "Step")[0]["values"] == [pytest.approx(12)] * 20
    assert curves(page, "Learning rate: dense")[2]["values"] == [0.001] * 20
    fills = curves(page, "Rows with an id: user")[0]["values"]
    assert fills == [float(f"{(200 + step) / 800:.6g}") for step in steps]
    assert curves(page, "Look-ups without a row: user")[0]["values"] == [0.4] * 20


def test_what_happened_is_marked_and_told(page: str):
    elements = Page(page).elements
    kinds = [str(a.get("class", "")).split()[0] for tag, a in elements if a.get("class")]
    charts = page.count('<figure class="chart"') - 3  # those of the parts have no marks
    assert kinds.count("failure") == charts and kinds.count("resume") == charts
    assert kinds.count("checkpoint") == charts * (4 + 2 + 4) and kinds.count("best") == charts * 3
    assert "step 500: rank 1 on 10.0.0.2: TrainingFailed: rank 1 of 2 failed: no space" in page
    assert "(taken back by a later life)" not in page
    for words in ("1,000 of 1,000", "600 of 1,000", "<td>stopped</td>", "continued on 2 ranks"):
        assert words in page


def test_the_best_checkpoint_is_the_last_that_was_best(tmp_path: Path):
    """Most evaluations of a run that learns are the best so far."""
    log = EventLog(tmp_path / "run")
    log.on_start(info(200))
    for step, best in ((50, True), (100, True), (150, False), (200, False)):
        log.on_window(report(step))
        log.on_checkpoint(Saved(step=step, path=f"/run/step-{step}", seconds=0.1, best=best))
    text = Path(write_run_page([tmp_path / "run"], tmp_path / "page.html")).read_text()
    found = re.findall(r'<path class="(checkpoint|best) [^>]*><title>step (\d+)', text)
    assert {step for kind, step in found if kind == "best"} == {"100"}
    assert {step for kind, step in found if kind == "checkpoint"} == {"50", "150", "200"}


def facts(text: str) -> dict[str, list[str]]:
    """The rows of the table of runs: name, and the cell of every run."""
    (table,) = re.findall(r'<div class="runs">.*?<tbody>(.*?)</tbody>', text)
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th>(.*?)</tr>", table)
    return {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in rows}


def test_the_table_of_runs_has_a_column_for_each_and_tells_which_settings_differ(tmp_path: Path):
    settings = {
        "one": {"name": "one", "seed": 3, "sparse_optimizer": {"name": "sgd", "lr": 0.1}},
        "two": {"name": "two", "seed": 3, "sparse_optimizer": {"name": "sgd", "lr": 0.2}},
        "three": {"name": "three", "seed": 3, "sparse_optimizer": {"name": "sgd", "lr": 0.1}},
    }
    settings["three"] |= {"ks": [1, 2], "evaluation": {"rows": None, "score": "auc"}}
    for name, own in settings.items():
        own.setdefault("evaluation", None)
        own["schema"] = "x" * 100 + name
    for name, own in settings.items():
        log = EventLog(tmp_path / name)
        log.on_start(replace(info(100, name=name), settings=own))
        log.on_window(report(50))
    paths = [tmp_path / name for name in settings]
    text = Path(write_run_page(paths, tmp_path / "page.html")).read_text()
    told = facts(text)
    assert {len(cells) for cells in told.values()} == {0, 3}, "a title has no cells"
    assert told["sparse_optimizer.lr"] == ["0.1", "0.2", "0.1"]
    assert told["ks"] == ["-", "-", "[1, 2]"] and told["steps"] == ["50 of 100"] * 3
    assert not {"seed", "name", "sparse_optimizer.name"} & set(told)
    assert told["evaluation.score"] == ["-", "-", "auc"]
    assert not {"evaluation", "evaluation.rows"} & set(told)  # None says as much as nothing
    assert len(set(told["schema"])) == 3 and max(map(len, told["schema"])) < 80
    assert "settings that differ" in told
    one = Path(write_run_page(paths[:1], tmp_path / "page.html")).read_text()
    assert {len(cells) for cells in facts(one).values()} == {1}
    same = Path(write_run_page([paths[0], paths[0]], tmp_path / "page.html")).read_text()
    assert "no setting differs" in facts(same)


def test_trained_for_is_the_time_of_the_windows_and_took_is_all(tmp_path: Path, monkeypatch):
    """Making the tables takes 100 s here, and an evaluation 5 s."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    log = EventLog(tmp_path / "run")
    log.on_start(info(200))
    now[0] += 100
    for step in (50, 100, 150, 200):
        log.on_window(replace(report(step), rows_per_s=51_200.0))
        now[0] += 1
    now[0] += 5
    log.on_end(None)
    text = Path(write_run_page([tmp_path / "run"], tmp_path / "page.html")).read_text()
    assert facts(text)["trained for"] == ["4.0 s"] and facts(text)["took"] == ["1.8 min"]


def test_a_clock_beyond_all_dates_hinders_no_page(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e300)
    tell(EventLog(tmp_path / "run"), 100)
    text = Path(write_run_page([tmp_path / "run"], tmp_path / "page.html")).read_text()
    assert facts(text)["began (UTC)"] == ["1e+300 s"]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_bars_of_few_ranks_are_no_blocks(ranks: int):
    text = stacks([[1.0]] * ranks, ["rank"] * ranks, ["resident"], str, width=530)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]
    assert len(widths) == ranks and min(widths) > 30 and max(widths) <= 60


def test_predicted_stands_beside_measured(page: str, three: list[Path]):
    told = 1e3 * read_events(three[2]).start.values["predicted"][0]["lookup_s"]
    (row,) = re.findall(r"<td>lookup</td><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page)[-1:]
    assert float(row[0]) == pytest.approx(told, rel=0.1) and float(row[1]) == pytest.approx(4.0)
    assert page.count("<summary>Plan of ") == 3 and "Tables on ranks" in page


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    for folder in ("x/run", "y/run", "z/other"):
        tell(EventLog(tmp_path / folder), 100, name="run")
    paths = [tmp_path / folder for folder in ("x/run", "y/run", "z/other/events.jsonl")]
    runs = [read_events(path) for path in paths]
    assert run_names(runs) == ["x/run", "y/run", "z/other"]
    assert run_names([runs[0], runs[0]]) == [f"{tmp_path}/x/run (1)", f"{tmp_path}/x/run (2)"]


def test_a_run_that_has_only_begun_or_diverged_has_a_page(tmp_path: Path):
    log = EventLog(tmp_path / "new")
    log.on_start(info(100))
    text = Path(write_run_page([tmp_path / "new"], tmp_path / "new.html")).read_text()
    assert "runs, or was killed" in text and '<figure class="chart"' not in text
    bare = replace(
        report(50), loss=float("nan"), auc=None, ne=None, scores={}, memory_bytes=(), step_s={}
    )
    log.on_window(bare)
    text = Path(write_run_page([tmp_path / "new"], tmp_path / "new.html")).read_text()
    assert "<figcaption>Loss" not in text and len(curves(text, "Rows per second")[0]["steps"]) == 1
    Page(text)


def test_a_long_run_has_a_small_page_and_keeps_its_spikes(tmp_path: Path):
    log = EventLog(tmp_path / "long")
    log.on_start(info(1_000_000))
    for step in range(100, 500_001, 100):
        window = report(step)
        log.on_window(replace(window, loss=0.9) if step == 250_000 else window)
        log.on_checkpoint(Saved(step=step, path=f"/long/step-{step}", seconds=0.1))
    log.on_end(None)
    text = Path(write_run_page([tmp_path / "long"], tmp_path / "long.html")).read_text()
    (loss,) = curves(text, "Loss")
    assert len(loss["steps"]) <= 700 and len(text) < 700_000
    assert (250_000, 0.9) in zip(loss["steps"], loss["values"], strict=True)
    assert loss["steps"][-1] == 500_000
    marked = re.findall(r'<path class="checkpoint [^>]*><title>step ([\d,]+)', text)
    assert len(marked) <= 200 * text.count('<figure class="chart"') and "500,000" in marked


def test_every_kind_of_table_and_every_part_of_a_step_has_a_color():
    colored = set(re.findall(r"^\.([\w-]+) { --c: #", beside("page.css"), re.MULTILINE))
    assert {f"k-{kind}" for kind in (*KINDS, "product_grid")} <= colored
    assert {f"s{part}" for part in range(len(STEP_PARTS))} <= colored
    assert {f"p{part}" for part in range(len(TIME_PARTS))} <= colored
    assert {f"c{run}" for run in range(COLORS)} <= colored


def test_mistakes_are_one_line_before_anything_is_written(tmp_path: Path, three: list[Path]):
    out = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="name the folder of at least one"):
        write_run_page([], out)
    with pytest.raises(ConfigError, match="there is no run at"):
        write_run_page([*three, tmp_path / "nowhere"], out)
    shutil.copytree(three[2], tmp_path / "broken")
    file = tmp_path / "broken" / "events.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{", *lines[1:]]))
    with pytest.raises(InputError, match=r"line 2 of .*events\.jsonl is no JSON"):
        write_run_page([tmp_path / "broken"], out)
    file.write_text(lines[0].replace('"world_size":2,"hosts":[[0,1]]', '"world_size":1,"hosts":[]'))
    with pytest.raises(InputError, match=r"the plan in the events of .*broken") as error:
        write_run_page([tmp_path / "broken"], out)
    assert "\n" not in str(error.value)
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"cannot write the page to .*it is a folder"):
        write_run_page(three, tmp_path)


def test_points_are_thinned_to_their_extremes():
    points = [(step, float(step % 7)) for step in range(10_000)]
    kept = thinned(points, 100)
    assert len(kept) <= 101 and kept == sorted(kept) and kept[-1] == points[-1]
    assert {value for _, value in kept} >= {0.0, 6.0} and set(kept) <= set(points)
    assert thinned(points[:50], 100) == points[:50]


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (0.396, 0.412), (-3e9, 2.7e9), (1e-7, 3e-7)])
def test_ticks_are_round_and_within(low: float, high: float):
    values = ticks(low, high)
    assert 2 <= len(values) <= 10
    assert all(low - 1e-9 * abs(high) <= value <= high + 1e-9 * abs(high) for value in values)
    steps = {f"{b - a:.3g}" for a, b in pairwise(values)}
    assert len(steps) == 1 and steps.pop().strip("0.")[0] in "125"


def test_a_few_far_values_do_not_flatten_the_rest():
    near = [1.0 + 0.01 * (i % 10) for i in range(200)]
    low, high, outside = value_range([*near, 1000.0], False)
    assert high < 2 and outside == 1 and low < 1.0
    assert value_range([1.0, 1000.0], False)[1:] == (pytest.approx(1059.94), 0)
    assert value_range(near, True)[0] == 0.0
    low, high, outside = value_range([0.5] * 30, False)
    assert low < 0.5 < high and outside == 0


def test_stacked_layers_lie_one_upon_the_other():
    layers = [
        Series(name=name, run=None, points=[(0, value), (10, value)])
        for name, value in (("x", 1.0), ("y", 3.0))
    ]
    text = draw(Chart(title="t", unit="ms", series=layers, from_zero=True, stacked=True), 10)
    below, above = re.findall(r'<polygon class="s\d" points="([^"]*)"', text)
    edges = [[float(pair.split(",")[1]) for pair in shape.split()] for shape in (below, above)]
    assert edges[0][0] == edges[1][2], "the upper edge of x is the lower edge of y"
    height = edges[0][2] - edges[0][0]
    assert edges[1][2] - edges[1][0] == pytest.approx(3 * height, abs=0.3)


PROBE = """<script>
window.addEventListener("error", event => document.title += " ERROR " + event.message);
addEventListener("load", () => {
  const figure = document.querySelector("figure.chart"), svg = figure.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const at = {clientX: box.left + box.width * 0.99, clientY: box.top + 50, bubbles: true};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.querySelector(".tip");
  document.body.dataset.tip = tip.innerText;
  const runs = document.querySelector(".runs .plain");
  document.body.dataset.cut = runs.scrollWidth - runs.clientWidth;
  document.getElementById("run0").click();
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  document.body.dataset.hidden = tip.innerText;
  const curve = document.querySelector(".curve.run-0");
  document.body.dataset.display = getComputedStyle(curve).display;
  svg.dispatchEvent(new PointerEvent("pointerleave", at));
  document.body.dataset.left = document.querySelectorAll(".tip").length;
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_numbers_under_the_pointer_and_hides_runs(page: str, tmp_path: Path):
    (tmp_path / "page.html").write_text(page.replace("<head>", f"<head>{PROBE}"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += ["--window-size=1400,900"]
    flags += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    (body,) = re.findall(r"<body ([^>]*)>", done.stdout)
    seen = {name: html.unescape(v) for name, v in re.findall(r'data-(\w+)="([^"]*)"', body)}
    assert "ERROR" not in done.stdout.split("</title>")[0].split("<title>")[1]
    loss = [
        f"{name}: {float(f'{report(1000, rate).loss:.5g}'):g}"
        for name, rate in (("a", 0.5), ("c", 0.4))
    ]
    tip = seen["tip"].split("\n")
    assert tip[0] == "step 1,000" and tip[1] == loss[0] and tip[3] == loss[1]
    assert tip[2].startswith('</script><b> & "b": ') and tip[2].endswith("(step 600)")
    assert seen["hidden"].split("\n")[1].startswith("</script>") and seen["display"] == "none"
    assert seen["left"] == "0" and seen["cut"] == "0"
