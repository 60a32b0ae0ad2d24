"""Style and script of the plan's page. Standard library only."""

from __future__ import annotations

KIND_COLORS = {
    "data_parallel": "#8a8f98",
    "table_wise": "#3b76af",
    "row_wise": "#d9822b",
    "column_wise": "#4f9d69",
    "table_row_wise": "#b5563c",
    "table_column_wise": "#2b8a8a",
    "grid_shard": "#8a5fb0",
    "product_grid": "#b0508a",
}
PART_COLORS = ("#3b76af", "#4f9d69", "#d9a52b", "#d9822b", "#8a5fb0", "#8a8f98")

_BASE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6573; --paper: #ffffff;
  --panel: #f5f6f8; --line: #d9dde3; --limit: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #a3acb9; --paper: #14181e; --panel: #1d232b; --line: #353d48;
    --limit: #ff8a80; }
}
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1100px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; margin: 0 0 14px; } h2 { font-size: 16px; margin: 26px 0 8px; }
p { color: var(--soft); margin: 0 0 8px; }
.facts { display: flex; flex-wrap: wrap; gap: 8px; }
.facts div { background: var(--panel); border-radius: 6px; padding: 7px 12px; }
.facts b { display: block; font-size: 16px; } .facts span { color: var(--soft); font-size: 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-bottom: 8px; font-size: 12px;
  color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; vertical-align: -1px; }
.legend i.limit { height: 2px; vertical-align: 3px; background: var(--limit); }
svg { display: block; } svg[role=img] { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } .map text { fill: var(--ink); }
line.grid { stroke: var(--line); stroke-width: 1; }
line.limit { stroke: var(--limit); stroke-width: 2; }
.map g:hover text { font-weight: 600; } .map g:hover rect { opacity: .75; }
.scroll { overflow: auto; max-height: 640px; border: 1px solid var(--line); border-radius: 6px;
  padding: 0 8px 6px 0; }
svg.axis { position: sticky; top: 0; background: var(--paper); }
table { border-collapse: collapse; width: 100%; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--panel); text-align: left; padding: 6px 10px;
  white-space: nowrap; }
td { border-top: 1px solid var(--line); padding: 3px 10px; max-width: 260px;
  overflow-wrap: anywhere; }
input { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 9px; width: 260px; margin-bottom: 8px; }
"""


def _fills() -> str:
    parts = [
        f".p{i} {{ fill: {color}; background: {color}; }}" for i, color in enumerate(PART_COLORS)
    ]
    # A legend is HTML and a bar is SVG: the one reads background, the other fill.
    kinds = [
        f".k-{kind} {{ fill: {color}; background: {color}; }}"
        for kind, color in KIND_COLORS.items()
    ]
    return "\n".join([*parts, *kinds])


STYLE = _BASE + _fills()

SCRIPT = """
const rows = [...document.querySelectorAll("tbody tr")];
document.getElementById("filter").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
"""
