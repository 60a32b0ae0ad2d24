"""Style and script of the page of runs. Standard library only."""

from __future__ import annotations

from rayrec.report.style import STYLE as BASE

# light, dark; neighbours differ in lightness too, for people who see fewer colors
RUN_COLORS = (
    ("#2f6fb0", "#6cabe8"),
    ("#c8641b", "#f0a05c"),
    ("#2f8a57", "#63c78f"),
    ("#8a4fb5", "#c08ee6"),
    ("#a8324a", "#ee8095"),
    ("#1f8590", "#5cc4cf"),
    ("#80651c", "#d6b65a"),
    ("#5a6270", "#aab3c2"),
)
PART_COLORS = (
    *("#9aa1ab", "#3b76af", "#4f9d69", "#d9a52b", "#8a5fb0"),
    *("#b0508a", "#d9822b", "#b5563c", "#2b8a8a", "#6b7d3a", "#5a6270"),
)

_RULES = """
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 14px; }
figure { margin: 0; position: relative; min-width: 0; }
figcaption { font-weight: 600; font-size: 13px; margin-bottom: 2px; }
small { font-weight: 400; color: var(--soft); }
svg[role=img] { background: var(--panel); border-radius: 6px; touch-action: pan-y; }
.curve { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.curve.dashed { stroke-dasharray: 4 3; } .dot { fill: var(--c); }
.band { fill: var(--c); opacity: .16; }
.checkpoint { fill: var(--c); opacity: .75; } .best { fill: var(--c); stroke: var(--ink); }
.resume line { stroke: var(--c); stroke-dasharray: 1 3; stroke-width: 1.5; }
.failure line, .failure path { stroke: var(--limit); stroke-width: 1.5; fill: none; }
.failure line { stroke-dasharray: 5 3; opacity: .7; }
.cursor { stroke: var(--ink); stroke-width: 1; opacity: .5; visibility: hidden; }
.tip { position: absolute; z-index: 1; pointer-events: none; background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; padding: 5px 9px; font-size: 12px;
  box-shadow: 0 2px 8px #0003; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tip i, .keys i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin-right: 5px; background: var(--c); }
.keys { position: sticky; top: 0; z-index: 1; background: var(--paper); padding: 8px 0;
  display: flex; flex-wrap: wrap; gap: 4px 16px; } .keys label { cursor: pointer; }
.keys input { width: auto; margin: 0 5px 0 0; }
.signs { font-size: 12px; color: var(--soft); }
.failed { color: var(--limit); font-weight: 600; }
details { margin-top: 10px; } summary { cursor: pointer; font-weight: 600; }
td.number { text-align: right; }
.plain { overflow-x: auto; } .plain td { white-space: nowrap; overflow-wrap: normal; }
.runs td { white-space: normal; overflow-wrap: anywhere; min-width: 80px; }
.runs tbody th { position: sticky; left: 0; top: auto; border-top: 1px solid var(--line);
  font-weight: 400; padding: 3px 10px; } .runs thead th { white-space: normal; }
.events td:last-child { white-space: normal; max-width: 700px; min-width: 240px; }
@media (max-width: 520px) { .charts { grid-template-columns: 1fr; } }
"""


def run_style(runs: int) -> str:
    """The style of a page with so many runs."""
    rules = [BASE, _RULES]
    for number, (light, dark) in enumerate(RUN_COLORS):
        rules.append(f".c{number} {{ --c: {light}; }}")
        rules.append(f"@media (prefers-color-scheme: dark) {{ .c{number} {{ --c: {dark}; }} }}")
    for number, color in enumerate(PART_COLORS):
        rules.append(f".s{number} {{ --c: {color}; fill: {color}; }}")
    # A run whose box is not ticked is hidden, also without a script.
    for run in range(runs):
        rules.append(f"body:has(#run{run}:not(:checked)) .run-{run} {{ display: none; }}")
    return "\n".join(rules)


# The page puts LEFT, RIGHT and WIDTH of a chart before it.
SCRIPT = """
const shown = {
  number: v => String(Number(v.toPrecision(5))),
  rate: v => Math.round(v).toLocaleString("en-US") + " /s",
  ms: v => Number(v.toPrecision(4)) + " ms",
  percent: v => Number((100 * v).toPrecision(4)) + "%",
  bytes: v => v >= 1e9 ? (v / 1e9).toFixed(3) + " GB" : (v / 1e6).toFixed(1) + " MB",
};
const charts = [...document.querySelectorAll("figure.chart")].map(figure => ({
  figure, last: Number(figure.dataset.last), show: shown[figure.dataset.unit],
  svg: figure.querySelector("svg"), cursor: figure.querySelector(".cursor"),
  curves: JSON.parse(figure.querySelector("script").textContent),
}));
const tip = document.createElement("div");
tip.className = "tip";

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function ticked(curve) {
  const box = document.getElementById("run" + curve.run);
  return curve.steps.length > 0 && (!box || box.checked);
}

function point(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * WIDTH;
  const share = Math.min(1, Math.max(0, (x - LEFT) / (WIDTH - LEFT - RIGHT)));
  const curves = chart.curves.filter(ticked);
  if (!curves.length) return leave();
  const first = curves[0].steps;
  const step = first[nearest(first, share * chart.last)];
  const at = LEFT + step / chart.last * (WIDTH - LEFT - RIGHT);
  for (const each of charts) {
    each.cursor.setAttribute("x1", at);
    each.cursor.setAttribute("x2", at);
    each.cursor.style.visibility = "visible";
  }
  tip.replaceChildren("step " + step.toLocaleString("en-US"));
  for (const curve of curves) {
    const index = nearest(curve.steps, step), line = document.createElement("div");
    const color = document.createElement("i");
    color.className = curve.color;
    const away = curve.steps[index] === step ? "" :
      " (step " + curve.steps[index].toLocaleString("en-US") + ")";
    line.append(color, curve.name + ": " + chart.show(curve.values[index]) + away);
    tip.append(line);
  }
  chart.figure.append(tip);
  const left = at / WIDTH * box.width;
  const right = left > box.width / 2;
  tip.style.left = right ? "auto" : left + 12 + "px";
  tip.style.right = right ? box.width - left + 12 + "px" : "auto";
  tip.style.top = "26px";
}

function leave() {
  tip.remove();
  for (const each of charts) each.cursor.style.visibility = "hidden";
}

for (const chart of charts) {
  chart.svg.addEventListener("pointermove", event => point(chart, event));
  chart.svg.addEventListener("pointerdown", event => point(chart, event));
  chart.svg.addEventListener("pointerleave", leave);
}
"""
