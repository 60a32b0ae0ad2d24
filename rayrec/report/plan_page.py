"""A plan as one self-contained HTML page: time by part and memory by rank, and the rank x table
map.

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
    head = f"<title>{escape(title)}: sharding plan</title><style>{STYLE}</style>"
    body = [f"<h1>{escape(title)}: sharding plan</h1>", _facts(plan)]
    if plan.estimates is not None:
        body += [_time(plan), _memory(plan)]
    body += [_map(plan), _tables(plan), f"<script>{SCRIPT}</script>"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
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
        facts += [
            ("predicted step", f"{format_ms(e.step_s)} ms"),
            ("slowest / mean rank", f"{e.step_s / e.mean_s if e.mean_s else 1.0:.2f}x"),
            (
                "fullest rank",
                f"{format_bytes(e.ranks[fullest].memory_bytes)} of {format_bytes(e.topology.memory_bytes[fullest])}",
            ),
            ("rows per rank", f"{e.batch_size}"),
            ("optimizer", e.sparse_optimizer),
        ]
    return (
        '<div class="facts">'
        + "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in facts)
        + "</div>"
    )


def _time(plan: ShardingPlan) -> str:
    assert plan.estimates is not None
    ranks = plan.estimates.ranks
    columns = [[getattr(rank, name) * 1e3 for _, name in TIME_PARTS] for rank in ranks]
    labels = [f"rank {i}: {format_ms(rank.total_s)} ms" for i, rank in enumerate(ranks)]
    chart = _stacks(
        columns, labels, [name for name, _ in TIME_PARTS], lambda value: f"{value:.3g} ms"
    )
    return f"<section><h2>Predicted time by rank</h2>{_legend([name for name, _ in TIME_PARTS])}{chart}</section>"


def _memory(plan: ShardingPlan) -> str:
    assert plan.estimates is not None
    e = plan.estimates
    columns = [[float(getattr(rank, name)) for _, name in MEMORY_PARTS] for rank in e.ranks]
    pairs = zip(e.ranks, e.topology.memory_bytes, strict=True)
    labels = [
        f"rank {i}: {format_bytes(rank.memory_bytes)} of {format_bytes(limit)}"
        for i, (rank, limit) in enumerate(pairs)
    ]
    names = [name for name, _ in MEMORY_PARTS]
    chart = _stacks(
        columns,
        labels,
        names,
        format_bytes,
        limits=[float(limit) for limit in e.topology.memory_bytes],
    )
    low, high = min(e.topology.memory_bytes), max(e.topology.memory_bytes)
    shown = high <= FAR * max(rank.memory_bytes for rank in e.ranks)
    limit = f"{format_bytes(low)} to {format_bytes(high)}" if low < high else format_bytes(high)
    text = f"Limit: {limit} a rank{'.' if shown else ', far above the scale.'}"
    return f"<section><h2>Memory by rank</h2><p>{text}</p>{_legend([*names, 'limit'] if shown else names)}{chart}</section>"


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span><i class="{"limit" if name == "limit" else f"p{i}"}"></i>{name}</span>'
        for i, name in enumerate(names)
    )
    return '<div class="legend">' + "".join(keys) + "</div>"


def _stacks(
    columns: Sequence[Sequence[float]],
    labels: Sequence[str],
    names: Sequence[str],
    show: Callable[[float], str],
    limits: Sequence[float] = (),
) -> str:
    """Stacked bars, one per rank, with a scale and, where given, a line at each rank's limit."""
    top = max([sum(column) for column in columns] + [0.0]) or 1.0
    near = [limit for limit in limits if limit <= FAR * top]
    top = max(top, *near, 0.0) * 1.05
    step = (CHART_WIDTH - LEFT) / len(columns)
    gap = min(6.0, step * 0.2) if step > 3 else 0.0
    out = [f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT + 22}" role="img">']
    for fraction in (0.0, 0.5, 1.0):
        y = CHART_HEIGHT * (1 - fraction)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text x="{LEFT - 6}" y="{y + (10 if fraction == 1 else 0):.1f}" text-anchor="end">{show(top * fraction)}</text>'
        )
    every = max(1, -(-len(columns) // 32))
    for rank, column in enumerate(columns):
        x, base = LEFT + rank * step, float(CHART_HEIGHT)
        lines = "\n".join(
            [
                labels[rank],
                *(f"{name}: {show(value)}" for name, value in zip(names, column, strict=True)),
            ]
        )
        out.append(f"<g><title>{escape(lines)}</title>")
        for part, value in enumerate(column):
            height = value / top * CHART_HEIGHT
            base -= height
            if height > 0.05:
                out.append(
                    f'<rect class="p{part}" x="{x:.2f}" y="{base:.2f}" width="{step - gap:.2f}" height="{height:.2f}"/>'
                )
        if limits and limits[rank] in near:
            y = CHART_HEIGHT * (1 - limits[rank] / top)
            out.append(
                f'<line class="limit" x1="{x:.2f}" x2="{x + step - gap:.2f}" y1="{y:.2f}" y2="{y:.2f}"/>'
            )
        out.append("</g>")
        if rank % every == 0:
            out.append(
                f'<text x="{x + (step - gap) / 2:.1f}" y="{CHART_HEIGHT + 15}" text-anchor="middle">{rank}</text>'
            )
    return "".join([*out, "</svg>"])


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
        if runs and runs[-1].last == rank - 1 and abs(runs[-1].share - share) < 0.02 * share:
            runs[-1].last = rank
        else:
            runs.append(_Run(rank, rank, share))
    return runs


def _order(plan: ShardingPlan) -> list[str]:
    """Tables by predicted work, the most first; in plan order where there is no prediction."""
    e = plan.estimates
    return (
        list(plan.tables)
        if e is None
        else sorted(plan.tables, key=lambda name: -e.tables[name].work_s)
    )


def _map(plan: ShardingPlan) -> str:
    names = _order(plan)
    cell = max(3.0, min(64.0, (CHART_WIDTH - NAMES) / plan.world_size))
    width, height = NAMES + cell * plan.world_size, ROW * len(names)
    kinds = [kind for kind in KIND_COLORS if any(plan.kind(name) == kind for name in names)]
    legend = "".join(f'<span><i class="k-{kind}"></i>{kind}</span>' for kind in kinds)
    every = max(1, -(-plan.world_size // int(max(1, cell * plan.world_size // 26))))
    head = [f'<svg width="{width:.0f}" height="18" class="axis">']
    for rank in range(0, plan.world_size, every):
        head.append(
            f'<text x="{NAMES + cell * (rank + 0.5):.1f}" y="13" text-anchor="middle">{rank}</text>'
        )
    out = [f'<svg width="{width:.0f}" height="{height}" class="map">']
    for host in plan.hosts:
        out.append(
            f'<line class="grid" x1="{NAMES + cell * host[0]:.1f}" x2="{NAMES + cell * host[0]:.1f}" y1="0" y2="{height}"/>'
        )
    for row, name in enumerate(names):
        kind, y = plan.kind(name), ROW * row
        shown = name if len(name) <= 32 else name[:30] + ".."
        out.append(
            f'<g><text x="{NAMES - 8}" y="{y + 11}" text-anchor="end">{escape(shown)}</text>'
        )
        for run in _runs(plan, name):
            ranks = (
                f"rank {run.first}" if run.first == run.last else f"ranks {run.first} to {run.last}"
            )
            title = f"{name}: {kind}, {ranks}: {run.share:.1%} of it{' each' if run.first != run.last else ''}"
            inner = max(cell * (run.last - run.first + 1) - (1.5 if cell > 6 else 0.5), 1.0)
            at = f'x="{NAMES + cell * run.first + 0.75:.2f}" y="{y + 1.5}" width="{inner:.2f}" height="{ROW - 3}"'
            out.append(f'<rect class="k-{kind}" {at}><title>{escape(title)}</title></rect>')
        out.append("</g>")
    drawing = "".join([*head, "</svg>"]) + "".join([*out, "</svg>"])
    order = "most work first" if plan.estimates is not None else "in the plan's order"
    return (
        f"<section><h2>Tables on ranks</h2><p>A row per table, {order}; a column per rank; lines part hosts.</p>"
        f'<div class="legend">{legend}</div><div class="scroll">{drawing}</div></section>'
    )


def _tables(plan: ShardingPlan) -> str:
    e = plan.estimates
    heads = ["table", "kind", "rows", "columns", "ranks", "storage"] + (
        ["weights", "work ms", "why", "next kind", "its work"] if e else []
    )
    rows = []
    for name in _order(plan):
        layout = plan.tables[name].layout
        ranks = "all" if isinstance(layout, Replicated) else format_ranks(layout.ranks)
        cells = [
            name,
            plan.kind(name),
            format_count(layout.shape[0]),
            str(layout.shape[1]),
            ranks,
            plan.tables[name].storage.label,
        ]
        if e is not None:
            t = e.tables[name]
            ratio = (
                f"{t.runner_up_work_s / t.work_s:.2f}x"
                if t.runner_up_work_s is not None and t.work_s
                else "-"
            )
            cells += [
                format_bytes(t.weight_bytes),
                format_ms(t.work_s),
                t.why,
                t.runner_up or "-",
                ratio,
            ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{head}</th>" for head in heads)
    return (
        '<section><h2>Tables</h2><input id="filter" placeholder="filter, for example row_wise" aria-label="filter tables">'
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></section>'
    )
