"""A plan as a plain text table for a terminal of 100 columns: one line of topology, a table of
ranks, a table of tables.

With the planner's estimates it shows bytes, predicted milliseconds and why each table lies as it
does; without them, what the layout alone can tell. Long lists end in "... and N more". Standard
library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.layout.estimates import PlanEstimates
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import fit, format_bytes, format_count, format_ms, format_ranks

WIDTH = 100
MAX_TABLES = 60
MAX_RANKS = 64
BAR = 15


def render_plan(plan: ShardingPlan) -> str:
    """The report; no line is longer than 100 characters."""
    lines = [
        _headline(plan),
        "",
        *_rank_lines(plan),
        "",
        *_table_lines(plan),
        *_storage_lines(plan),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _headline(plan: ShardingPlan) -> str:
    sizes = sorted({len(host) for host in plan.hosts})
    per_host = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
    estimates = plan.estimates
    device = f" {estimates.topology.device}" if estimates else ""
    hosts = f"{len(plan.hosts)} host{'s' * (len(plan.hosts) > 1)} x {per_host}{device}"
    head = f"Plan: {_plural(len(plan.tables), 'table')} on {_plural(plan.world_size, 'rank')} ({hosts})"
    if estimates is None:
        return head
    worst = max(estimates.ranks, key=lambda rank: rank.memory_bytes)
    imbalance = estimates.step_s / estimates.mean_s if estimates.mean_s else 1.0
    return (
        f"{head}, {estimates.batch_size} rows per rank, {estimates.sparse_optimizer}\n"
        f"Predicted without dense layers: {format_ms(estimates.step_s)} ms a step (rank {estimates.slowest_rank}, "
        f"{imbalance:.2f}x the mean); at most {format_bytes(worst.memory_bytes)} a rank"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _rank_lines(plan: ShardingPlan) -> list[str]:
    shards = [0] * plan.world_size
    elements = [0] * plan.world_size
    names: list[set[str]] = [set() for _ in range(plan.world_size)]
    for shard in plan.shards():
        shards[shard.rank] += 1
        elements[shard.rank] += len(shard.rows) * len(shard.cols)
        names[shard.rank].add(shard.table)
    host_of = [i for i, host in enumerate(plan.hosts) for _ in host]
    shown = range(min(plan.world_size, MAX_RANKS))
    left = [
        f"{f'{host_of[rank]}/{rank}':>9} {len(names[rank]):>6} {shards[rank]:>6}" for rank in shown
    ]
    head = f"{'host/rank':>9} {'tables':>6} {'shards':>6}"
    if plan.estimates is None:
        peak = max(elements) or 1
        lines = [f"{head} {'elements':>9}"]
        lines += [
            f"{left[rank]} {format_count(elements[rank]):>9} {_bar(elements[rank] / peak)}"
            for rank in shown
        ]
    else:
        lines = [
            f"{head} {'weights':>8} {'optim':>8} {'buffers':>8} {'full':>4} {'exch ms':>7} {'lookup':>7} {'update':>7} {'total':>7}"
        ]
        lines += [f"{left[rank]} {_rank_estimate(plan.estimates, rank)}" for rank in shown]
    if plan.world_size > MAX_RANKS:
        lines.append(f"... and {plan.world_size - MAX_RANKS} more ranks")
    return lines


def _rank_estimate(estimates: PlanEstimates, rank: int) -> str:
    e, limit = estimates.ranks[rank], estimates.topology.memory_bytes[rank]
    sizes = " ".join(
        f"{format_bytes(b):>8}" for b in (e.weight_bytes, e.optimizer_bytes, e.buffer_bytes)
    )
    full = f"{min(e.memory_bytes / limit, 9.99):>4.0%}" if limit else "   -"
    times = " ".join(
        f"{format_ms(s):>7}" for s in (e.exchange_s, e.lookup_s, e.update_s, e.total_s)
    )
    return f"{sizes} {full} {times} {_bar(e.total_s / estimates.step_s if estimates.step_s else 0.0, 11)}"


def _bar(fraction: float, width: int = BAR) -> str:
    return "#" * round(width * fraction)


def _table_lines(plan: ShardingPlan) -> list[str]:
    rows: list[Sequence[str]] = []
    for name in list(plan.tables)[:MAX_TABLES]:
        layout = plan.tables[name].layout
        row = [
            name,
            plan.kind(name),
            f"{format_count(layout.shape[0])} x {layout.shape[1]}",
            format_ranks(layout.ranks),
        ]
        if plan.estimates is not None:
            e = plan.estimates.tables[name]
            row += [
                e.data_type,
                format_bytes(e.weight_bytes),
                e.why,
                _runner_up(e.runner_up, e.runner_up_work_s, e.work_s),
            ]
        rows.append(row)
    if plan.estimates is None:
        lines = [f"{'table':<40} {'kind':<17} {'rows x cols':>13}  ranks"]
        lines += [
            f"{fit(r[0], 40):<40} {r[1]:<17} {fit(r[2], 13):>13}  {fit(r[3], 26)}" for r in rows
        ]
    else:
        lines = [
            f"{'table':<13} {'kind':<17} {'rows x cols':>11} {'type':<4} {'ranks':<7} {'bytes':>8} {'why':<10} next kind, work"
        ]
        lines += [
            f"{fit(r[0], 13):<13} {r[1]:<17} {fit(r[2], 11):>11} {r[4]:<4} {fit(r[3], 7):<7} {r[5]:>8} {fit(r[6], 10):<10} {r[7]}"
            for r in rows
        ]
    if len(plan.tables) > MAX_TABLES:
        lines.append(f"... and {len(plan.tables) - MAX_TABLES} more tables")
    return lines


def _storage_lines(plan: ShardingPlan) -> list[str]:
    """A line per storage other than the device, with its tables."""
    names: dict[str, list[str]] = {}
    for name, placement in plan.tables.items():
        if placement.storage.kind != "device":
            names.setdefault(placement.storage.label, []).append(name)
    return [
        fit(
            f"storage {label}: {len(tables)} of {len(plan.tables)} tables: {', '.join(tables)}",
            WIDTH,
        )
        for label, tables in names.items()
    ]


def _runner_up(kind: str | None, its_work_s: float | None, work_s: float) -> str:
    if kind is None or its_work_s is None:
        return "-"
    ratio = its_work_s / work_s if work_s else 1.0
    shown = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}" if ratio < 999.5 else ">1k"
    return f"{kind} {shown[:4].rstrip('.')}x"
