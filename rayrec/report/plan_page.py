"""A plan as one self-contained HTML page: time and memory by rank, and the rank x table map.

No script, font or image from elsewhere; drawings are inline SVG, and the only script filters the
table list. Neighbouring ranks with equal pieces are one rectangle, so that a thousand tables on a
thousand ranks stay some thousand shapes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rayrec.layout.estimates import PlanEstimates
from rayrec.layout.geometry import Replicated
from rayrec.layout.kinds import KINDS
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import fit, format_bytes, format_count, format_ms, format_ranks
from rayrec.report.bars import CHART_WIDTH, FAR, stacks
from rayrec.report.elements import beside, cell, facts, legend, page, section, table, text_at

ROW = 15  # height of a row of the map
NAMES = 210  # width of the map's names
# field of a rank's estimates -> what a reader calls it
TIME_PARTS = {
    "input_s": "ids in",
    "lookup_s": "lookup",
    "output_s": "rows out",
    "gradient_s": "gradients in",
    "update_s": "update",
    "overhead_s": "overhead",
}
MEMORY_PARTS = {
    "weight_bytes": "weights",
    "optimizer_bytes": "optimizer state",
    "buffer_bytes": "exchange buffers",
}


def render_page(plan: ShardingPlan, title: str = "plan") -> str:
    """Return the page of a plan; a title is such as the model's name."""
    return page(
        f"{title}: sharding plan", [*plan_sections(plan), _tables(plan)], beside("filter.js")
    )


def plan_sections(plan: ShardingPlan) -> list[str]:
    """Return the plan's figures, its time and memory where it has estimates, and its map."""
    estimates = plan.estimates
    estimated = [_time(estimates), _memory(estimates)] if estimates is not None else []
    return [_facts(plan), *estimated, _map(plan)]


def _facts(plan: ShardingPlan) -> str:
    named = [
        ("tables", f"{len(plan.tables)}"),
        ("ranks", f"{plan.world_size}"),
        ("hosts", f"{len(plan.hosts)}"),
    ]
    e = plan.estimates
    if e is not None:
        fullest, limits = e.fullest_rank, e.topology.memory_bytes
        taken = f"{format_bytes(e.ranks[fullest].memory_bytes)} of {format_bytes(limits[fullest])}"
        named += [
            ("predicted step", f"{format_ms(e.step_s)} ms"),
            ("slowest / mean rank", f"{e.imbalance:.2f}x"),
            ("fullest rank", taken),
            ("rows per rank", f"{e.batch_size}"),
            ("optimizer", e.sparse_optimizer),
        ]
    return facts(named)


def _time(estimates: PlanEstimates) -> str:
    columns = [[getattr(rank, field) * 1e3 for field in TIME_PARTS] for rank in estimates.ranks]
    labels = [f"rank {i}: {format_ms(rank.total_s)} ms" for i, rank in enumerate(estimates.ranks)]
    names = list(TIME_PARTS.values())
    chart = stacks(columns, labels, names, lambda value: f"{value:.3g} ms")
    return section("Predicted time by rank", _parts(names), chart)


def _memory(estimates: PlanEstimates) -> str:
    limits, ranks = estimates.topology.memory_bytes, estimates.ranks
    columns = [[float(getattr(rank, field)) for field in MEMORY_PARTS] for rank in ranks]
    labels = []
    for i, rank in enumerate(ranks):
        labels.append(f"rank {i}: {format_bytes(rank.memory_bytes)} of {format_bytes(limits[i])}")
    names = list(MEMORY_PARTS.values())
    chart = stacks(columns, labels, names, format_bytes, limits)
    low, high = min(limits), max(limits)
    shown = high <= FAR * max(rank.memory_bytes for rank in ranks)
    limit = f"{format_bytes(low)} to {format_bytes(high)}" if low < high else format_bytes(high)
    note = f"Limit: {limit} a rank{'.' if shown else ', far above the scale.'}"
    return section("Memory by rank", _parts(names, limit=shown), chart, note=note)


def _parts(names: Sequence[str], limit: bool = False) -> str:
    keys = [(f"p{part}", name) for part, name in enumerate(names)]
    return legend([*keys, ("limit", "limit")] if limit else keys)


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
    # A column stays visible on large worlds, where the map scrolls, and small worlds get no huge
    # columns.
    step = max(3.0, min(64.0, (CHART_WIDTH - NAMES) / plan.world_size))
    width, height = NAMES + step * plan.world_size, ROW * len(names)
    used = {plan.kind(name) for name in names}
    keys = [(f"k-{kind}", kind) for kind in (*KINDS, "product_grid") if kind in used]
    every = max(1, -(-plan.world_size // int(max(1, step * plan.world_size // 26))))
    out = [f'<svg width="{width:.0f}" height="18" class="axis">']
    for rank in range(0, plan.world_size, every):
        out.append(text_at(NAMES + step * (rank + 0.5), 13, "middle", f"{rank}"))
    out.append(f'</svg><svg width="{width:.0f}" height="{height}" class="map">')
    for host in plan.hosts:
        x = f"{NAMES + step * host[0]:.1f}"
        out.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
    for row, name in enumerate(names):
        out += _map_row(plan, name, ROW * row, step)
    drawing = f'<div class="scroll">{"".join(out)}</svg></div>'
    order = "most work first" if plan.estimates is not None else "in the plan's order"
    note = f"A row per table, {order}; a column per rank; lines part hosts."
    return section("Tables on ranks", legend(keys), drawing, note=note)


def _map_row(plan: ShardingPlan, name: str, y: int, step: float) -> list[str]:
    kind = plan.kind(name)
    out = [f"<g>{text_at(NAMES - 8, y + 11, 'end', fit(name, 32))}"]
    for run in _runs(plan, name):
        ranks, each = f"ranks {run.first} to {run.last}", " each"
        if run.first == run.last:
            ranks, each = f"rank {run.first}", ""
        title = f"{name}: {kind}, {ranks}: {run.share:.1%} of it{each}"
        inner = max(step * (run.last - run.first + 1) - (1.5 if step > 6 else 0.5), 1.0)
        place = f'x="{NAMES + step * run.first + 0.75:.2f}" y="{y + 1.5}" width="{inner:.2f}"'
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
        rows.append(map(cell, cells))
    box = (
        '<input id="filter" placeholder="filter, for example row_wise" aria-label="filter tables">'
    )
    return section("Tables", box, table(heads, rows, "scroll"))
