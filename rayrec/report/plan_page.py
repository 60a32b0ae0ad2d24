"""A plan as one self-contained HTML page: time and memory by rank, and the rank x table map.

No script, font or image from elsewhere; drawings are inline SVG, and the only script filters the
table list. Neighbouring ranks with equal pieces are one rectangle, so that a thousand tables on a
thousand ranks stay some thousand shapes. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from rayrec.layout.estimates import PlanEstimates
from rayrec.layout.geometry import Replicated
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import format_bytes, format_count, format_ms, format_ranks
from rayrec.report.drawing import CHART_WIDTH, FAR, legend, stacks, text_at
from rayrec.report.style import KIND_COLORS, SCRIPT, STYLE

ROW = 15  # height of a row of the map
NAMES = 210  # width of the map's names
TIME_PARTS = (
    ("ids in", "input_s"),
    ("lookup", "lookup_s"),
    ("rows out", "output_s"),
    ("gradients in", "gradient_s"),
    ("update", "update_s"),
    ("overhead", "overhead_s"),
)
MEMORY_PARTS = (
    ("weights", "weight_bytes"),
    ("optimizer state", "optimizer_bytes"),
    ("exchange buffers", "buffer_bytes"),
)


def render_page(plan: ShardingPlan, title: str = "plan") -> str:
    """The page as text.

    Args:
        title: of the page, such as the model's name.
    """
    # Names of tables and titles are the user's text, so every one of them is escaped.
    head = f"<title>{escape(title)}: sharding plan</title><style>{STYLE}</style>"
    body = [f"<h1>{escape(title)}: sharding plan</h1>", *plan_sections(plan)]
    body += [_tables(plan), f"<script>{SCRIPT}</script>"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">',
        head,
        "</head><body>",
        *body,
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def plan_sections(plan: ShardingPlan) -> list[str]:
    """The plan's figures, its time and memory where it has estimates, and its map, as HTML."""
    estimates = plan.estimates
    estimated = [_time(estimates), _memory(estimates)] if estimates is not None else []
    return [_facts(plan), *estimated, _map(plan)]


def _facts(plan: ShardingPlan) -> str:
    facts = [
        ("tables", f"{len(plan.tables)}"),
        ("ranks", f"{plan.world_size}"),
        ("hosts", f"{len(plan.hosts)}"),
    ]
    e = plan.estimates
    if e is not None:
        fullest = max(range(plan.world_size), key=lambda r: e.ranks[r].memory_bytes)
        taken = format_bytes(e.ranks[fullest].memory_bytes)
        facts += [
            ("predicted step", f"{format_ms(e.step_s)} ms"),
            ("slowest / mean rank", f"{e.step_s / e.mean_s if e.mean_s else 1.0:.2f}x"),
            ("fullest rank", f"{taken} of {format_bytes(e.topology.memory_bytes[fullest])}"),
            ("rows per rank", f"{e.batch_size}"),
            ("optimizer", e.sparse_optimizer),
        ]
    cells = [f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in facts]
    return f'<div class="facts">{"".join(cells)}</div>'


def _time(estimates: PlanEstimates) -> str:
    names = [name for name, _ in TIME_PARTS]
    columns, labels = [], []
    for i, rank in enumerate(estimates.ranks):
        columns.append([getattr(rank, field) * 1e3 for _, field in TIME_PARTS])
        labels.append(f"rank {i}: {format_ms(rank.total_s)} ms")
    chart = stacks(columns, labels, names, lambda value: f"{value:.3g} ms")
    return f"<section><h2>Predicted time by rank</h2>{legend(names)}{chart}</section>"


def _memory(estimates: PlanEstimates) -> str:
    limits = estimates.topology.memory_bytes
    names = [name for name, _ in MEMORY_PARTS]
    columns, labels = [], []
    for i, rank in enumerate(estimates.ranks):
        columns.append([float(getattr(rank, field)) for _, field in MEMORY_PARTS])
        labels.append(f"rank {i}: {format_bytes(rank.memory_bytes)} of {format_bytes(limits[i])}")
    chart = stacks(columns, labels, names, format_bytes, limits)
    low, high = min(limits), max(limits)
    shown = high <= FAR * max(rank.memory_bytes for rank in estimates.ranks)
    limit = f"{format_bytes(low)} to {format_bytes(high)}" if low < high else format_bytes(high)
    text = f"Limit: {limit} a rank{'.' if shown else ', far above the scale.'}"
    keys = legend([*names, "limit"] if shown else names)
    return f"<section><h2>Memory by rank</h2><p>{text}</p>{keys}{chart}</section>"


@dataclass(slots=True)
class _Run:
    """Neighbouring ranks that hold equally much of a table."""

    first: int
    last: int
    share: float


def _runs(plan: ShardingPlan, name: str) -> list[_Run]:
    layout = plan.tables[name].layout
    elements: dict[int, int] = {}
    for shard in layout.shards(name):
        elements[shard.rank] = elements.get(shard.rank, 0) + len(shard.rows) * len(shard.cols)
    whole = layout.shape[0] * layout.shape[1]
    runs: list[_Run] = []
    for rank, held in sorted(elements.items()):
        share = held / whole
        # Even cuts differ by a row, so shares within 2% count as equal.
        if runs and runs[-1].last == rank - 1 and abs(runs[-1].share - share) < 0.02 * share:
            runs[-1].last = rank
        else:
            runs.append(_Run(rank, rank, share))
    return runs


def _order(plan: ShardingPlan) -> list[str]:
    """Tables by predicted work, the most first; in plan order where there is no prediction."""
    e = plan.estimates
    if e is None:
        return list(plan.tables)
    return sorted(plan.tables, key=lambda name: -e.tables[name].work_s)


def _map(plan: ShardingPlan) -> str:
    names = _order(plan)
    # A cell stays visible on large worlds, where the map scrolls, and small worlds get no huge
    # cells.
    cell = max(3.0, min(64.0, (CHART_WIDTH - NAMES) / plan.world_size))
    width, height = NAMES + cell * plan.world_size, ROW * len(names)
    kinds = [kind for kind in KIND_COLORS if any(plan.kind(name) == kind for name in names)]
    keys = "".join(f'<span><i class="k-{kind}"></i>{kind}</span>' for kind in kinds)
    every = max(1, -(-plan.world_size // int(max(1, cell * plan.world_size // 26))))
    head = [f'<svg width="{width:.0f}" height="18" class="axis">']
    for rank in range(0, plan.world_size, every):
        head.append(text_at(f"{NAMES + cell * (rank + 0.5):.1f}", "13", "middle", f"{rank}"))
    out = [f'<svg width="{width:.0f}" height="{height}" class="map">']
    for host in plan.hosts:
        x = f"{NAMES + cell * host[0]:.1f}"
        out.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
    for row, name in enumerate(names):
        out += _map_row(plan, name, ROW * row, cell)
    drawing = "".join([*head, "</svg>"]) + "".join([*out, "</svg>"])
    order = "most work first" if plan.estimates is not None else "in the plan's order"
    return (
        f"<section><h2>Tables on ranks</h2><p>A row per table, {order}; a column per rank; "
        f'lines part hosts.</p><div class="legend">{keys}</div>'
        f'<div class="scroll">{drawing}</div></section>'
    )


def _map_row(plan: ShardingPlan, name: str, y: int, cell: float) -> list[str]:
    kind = plan.kind(name)
    shown = name if len(name) <= 32 else name[:30] + ".."
    out = [f"<g>{text_at(f'{NAMES - 8}', f'{y + 11}', 'end', escape(shown))}"]
    for run in _runs(plan, name):
        ranks, each = f"ranks {run.first} to {run.last}", " each"
        if run.first == run.last:
            ranks, each = f"rank {run.first}", ""
        title = f"{name}: {kind}, {ranks}: {run.share:.1%} of it{each}"
        inner = max(cell * (run.last - run.first + 1) - (1.5 if cell > 6 else 0.5), 1.0)
        place = f'x="{NAMES + cell * run.first + 0.75:.2f}" y="{y + 1.5}" width="{inner:.2f}"'
        bar = f'<rect class="k-{kind}" {place} height="{ROW - 3}">'
        out.append(f"{bar}<title>{escape(title)}</title></rect>")
    return [*out, "</g>"]


def _tables(plan: ShardingPlan) -> str:
    e = plan.estimates
    heads = ["table", "kind", "rows", "columns", "ranks", "storage"]
    heads += ["weights", "work ms", "why", "next kind", "its work"] if e else []
    rows = []
    for name in _order(plan):
        layout = plan.tables[name].layout
        ranks = "all" if isinstance(layout, Replicated) else format_ranks(layout.ranks)
        shape = [format_count(layout.shape[0]), str(layout.shape[1])]
        cells = [name, plan.kind(name), *shape, ranks, plan.tables[name].storage.label]
        if e is not None:
            t = e.tables[name]
            ratio = "-"
            if t.runner_up_work_s is not None and t.work_s:
                ratio = f"{t.runner_up_work_s / t.work_s:.2f}x"
            cells += [format_bytes(t.weight_bytes), format_ms(t.work_s)]
            cells += [t.why, t.runner_up or "-", ratio]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{head}</th>" for head in heads)
    return (
        '<section><h2>Tables</h2><input id="filter" placeholder="filter, for example row_wise" '
        'aria-label="filter tables"><div class="scroll"><table>'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div></section>"
    )
