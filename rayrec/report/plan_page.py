"""A plan as one self-contained HTML page: time and memory by rank, and the rank x table map.

No script, font or image from elsewhere; drawings are inline SVG, and the only script filters the
table list. Neighbouring ranks with equal pieces are one rectangle, so that a thousand tables on a
thousand ranks stay some thousand shapes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rayrec.layout.geometry import Replicated
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import format_bytes, format_count, format_ms, format_ranks
from rayrec.report.style import KIND_COLORS, SCRIPT, STYLE

CHART_WIDTH, CHART_HEIGHT = 1060, 190
LEFT = 64  # of a chart, for its scale
ROW = 15  # height of a row of the map
# a memory limit this many times above the fullest rank would flatten the bars, and is told in words
FAR = 3
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
    body = [f"<h1>{escape(title)}: sharding plan</h1>", _facts(plan)]
    if plan.estimates is not None:
        body += [_time(plan), _memory(plan)]
    body += [_map(plan), _tables(plan), f"<script>{SCRIPT}</script>"]
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


def _time(plan: ShardingPlan) -> str:
    assert plan.estimates is not None
    names = [name for name, _ in TIME_PARTS]
    columns, labels = [], []
    for i, rank in enumerate(plan.estimates.ranks):
        columns.append([getattr(rank, field) * 1e3 for _, field in TIME_PARTS])
        labels.append(f"rank {i}: {format_ms(rank.total_s)} ms")
    chart = _stacks(columns, labels, names, lambda value: f"{value:.3g} ms")
    return f"<section><h2>Predicted time by rank</h2>{_legend(names)}{chart}</section>"


def _memory(plan: ShardingPlan) -> str:
    assert plan.estimates is not None
    e = plan.estimates
    limits = e.topology.memory_bytes
    names = [name for name, _ in MEMORY_PARTS]
    columns, labels = [], []
    for i, rank in enumerate(e.ranks):
        columns.append([float(getattr(rank, field)) for _, field in MEMORY_PARTS])
        labels.append(f"rank {i}: {format_bytes(rank.memory_bytes)} of {format_bytes(limits[i])}")
    chart = _stacks(columns, labels, names, format_bytes, limits)
    low, high = min(limits), max(limits)
    shown = high <= FAR * max(rank.memory_bytes for rank in e.ranks)
    limit = f"{format_bytes(low)} to {format_bytes(high)}" if low < high else format_bytes(high)
    text = f"Limit: {limit} a rank{'.' if shown else ', far above the scale.'}"
    legend = _legend([*names, "limit"] if shown else names)
    return f"<section><h2>Memory by rank</h2><p>{text}</p>{legend}{chart}</section>"


def _legend(names: Sequence[str]) -> str:
    keys = []
    for i, name in enumerate(names):
        style = "limit" if name == "limit" else f"p{i}"
        keys.append(f'<span><i class="{style}"></i>{name}</span>')
    return f'<div class="legend">{"".join(keys)}</div>'


def _stacks(
    columns: Sequence[Sequence[float]],
    labels: Sequence[str],
    names: Sequence[str],
    show: Callable[[float], str],
    limits: Sequence[float] = (),
) -> str:
    """Stacked bars, one per rank, with a scale and, where given, a line at each rank's limit."""
    # Bars must have a scale even where all of them are 0.
    top = max([sum(column) for column in columns] + [0.0]) or 1.0
    near = [limit for limit in limits if limit <= FAR * top]
    # The 5% keep a bar or a line at the top off the edge.
    top = max(top, *near, 0.0) * 1.05
    step = (CHART_WIDTH - LEFT) / len(columns)
    # With thousands of ranks a gap would be wider than the bars.
    gap = min(6.0, step * 0.2) if step > 3 else 0.0
    out = [f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT + 22}" role="img">']
    for fraction in (0.0, 0.5, 1.0):
        y = CHART_HEIGHT * (1 - fraction)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        below = y + (10 if fraction == 1 else 0)  # the topmost would be cut off above its line
        out.append(_text(f"{LEFT - 6}", f"{below:.1f}", "end", show(top * fraction)))
    # At most 32 ranks get a number, so that the numbers do not overlap.
    every = max(1, -(-len(columns) // 32))
    for rank, column in enumerate(columns):
        x, base = LEFT + rank * step, float(CHART_HEIGHT)
        parts = [f"{name}: {show(value)}" for name, value in zip(names, column, strict=True)]
        title = "\n".join([labels[rank], *parts])
        out.append(f"<g><title>{escape(title)}</title>")
        for part, value in enumerate(column):
            height = value / top * CHART_HEIGHT
            base -= height
            # Less than a twentieth of a pixel is not seen, and only makes the page larger.
            if height > 0.05:
                place = f'x="{x:.2f}" y="{base:.2f}" width="{step - gap:.2f}"'
                out.append(f'<rect class="p{part}" {place} height="{height:.2f}"/>')
        if limits and limits[rank] in near:
            y = CHART_HEIGHT * (1 - limits[rank] / top)
            place = f'x1="{x:.2f}" x2="{x + step - gap:.2f}" y1="{y:.2f}" y2="{y:.2f}"'
            out.append(f'<line class="limit" {place}/>')
        out.append("</g>")
        if rank % every == 0:
            middle = f"{x + (step - gap) / 2:.1f}"
            out.append(_text(middle, f"{CHART_HEIGHT + 15}", "middle", f"{rank}"))
    return "".join([*out, "</svg>"])


def _text(x: str, y: str, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


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
    legend = "".join(f'<span><i class="k-{kind}"></i>{kind}</span>' for kind in kinds)
    every = max(1, -(-plan.world_size // int(max(1, cell * plan.world_size // 26))))
    head = [f'<svg width="{width:.0f}" height="18" class="axis">']
    for rank in range(0, plan.world_size, every):
        head.append(_text(f"{NAMES + cell * (rank + 0.5):.1f}", "13", "middle", f"{rank}"))
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
        f'lines part hosts.</p><div class="legend">{legend}</div>'
        f'<div class="scroll">{drawing}</div></section>'
    )


def _map_row(plan: ShardingPlan, name: str, y: int, cell: float) -> list[str]:
    kind = plan.kind(name)
    shown = name if len(name) <= 32 else name[:30] + ".."
    out = [f"<g>{_text(f'{NAMES - 8}', f'{y + 11}', 'end', escape(shown))}"]
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
