"""A plan as plain text for a terminal of 100 columns: topology, a table of ranks, one of tables.

With the planner's estimates it shows bytes, predicted milliseconds and why each table lies as it
does; without them, what the layout alone can tell. Long lists end in "... and N more". Standard
library only.
"""

from __future__ import annotations

from rayrec.layout.estimates import PlanEstimates, TableEstimate
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import fit, format_bytes, format_count, format_ms, format_ranks

WIDTH = 100
MAX_TABLES = 60
MAX_RANKS = 64
BAR = 15


def render_plan(plan: ShardingPlan) -> str:
    """The report; no line is longer than 100 characters."""
    lines = [_headline(plan), "", *_rank_lines(plan), ""]
    lines += [*_table_lines(plan), *_storage_lines(plan)]
    return "\n".join(line.rstrip() for line in lines)


def _headline(plan: ShardingPlan) -> str:
    sizes = sorted({len(host) for host in plan.hosts})
    per_host = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
    estimates = plan.estimates
    device = f" {estimates.topology.device}" if estimates else ""
    hosts = f"{len(plan.hosts)} host{'s' * (len(plan.hosts) > 1)} x {per_host}{device}"
    tables, ranks = _plural(len(plan.tables), "table"), _plural(plan.world_size, "rank")
    head = f"Plan: {tables} on {ranks} ({hosts})"
    if estimates is None:
        return head
    worst = estimates.ranks[estimates.fullest_rank]
    return (
        f"{head}, {estimates.batch_size} rows per rank, {estimates.sparse_optimizer}\n"
        f"Predicted without dense layers: {format_ms(estimates.step_s)} ms a step "
        f"(rank {estimates.slowest_rank}, {estimates.imbalance:.2f}x the mean); "
        f"at most {format_bytes(worst.memory_bytes)} a rank"
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
    if plan.estimates is None:
        lines = ["host/rank tables shards  elements"]
    else:
        lines = ["host/rank tables shards  weights    optim  buffers full"]
        lines[0] += " exch ms  lookup  update   total"
    # Without estimates the bars compare elements: nothing else is known of the ranks.
    peak = max(elements) or 1
    for rank in shown:
        where = f"{host_of[rank]}/{rank}"
        line = f"{where:>9} {len(names[rank]):>6} {shards[rank]:>6}"
        if plan.estimates is None:
            line += f" {format_count(elements[rank]):>9} {_bar(elements[rank] / peak)}"
        else:
            line += f" {_rank_estimate(plan.estimates, rank)}"
        lines.append(line)
    if plan.world_size > MAX_RANKS:
        lines.append(f"... and {plan.world_size - MAX_RANKS} more ranks")
    return lines


def _rank_estimate(estimates: PlanEstimates, rank: int) -> str:
    own, limit = estimates.ranks[rank], estimates.topology.memory_bytes[rank]
    num_bytes = own.weight_bytes, own.optimizer_bytes, own.buffer_bytes
    seconds = own.exchange_s, own.lookup_s, own.update_s, own.total_s
    sizes = " ".join(f"{format_bytes(value):>8}" for value in num_bytes)
    # A plan by hand may be far over a limit; the cap keeps the column four characters wide.
    full = f"{min(own.memory_bytes / limit, 9.99):>4.0%}" if limit else "   -"
    times = " ".join(f"{format_ms(value):>7}" for value in seconds)
    share = own.total_s / estimates.step_s if estimates.step_s else 0.0
    return f"{sizes} {full} {times} {_bar(share, 11)}"


def _bar(fraction: float, width: int = BAR) -> str:
    return "#" * round(width * fraction)


def _table_lines(plan: ShardingPlan) -> list[str]:
    if plan.estimates is None:
        lines = [f"{'table':<40} {'kind':<17} {'rows x cols':>13}  ranks"]
    else:
        head = f"{'table':<13} {'kind':<17} rows x cols type {'ranks':<7} {'bytes':>8}"
        lines = [f"{head} {'why':<10} next kind, work"]
    for name in list(plan.tables)[:MAX_TABLES]:
        layout, kind = plan.tables[name].layout, plan.kind(name)
        shape = f"{format_count(layout.shape[0])} x {layout.shape[1]}"
        ranks = format_ranks(layout.ranks)
        if plan.estimates is None:
            lines.append(f"{fit(name, 40):<40} {kind:<17} {fit(shape, 13):>13}  {fit(ranks, 26)}")
            continue
        told = plan.estimates.tables[name]
        line = f"{fit(name, 13):<13} {kind:<17} {fit(shape, 11):>11} {told.data_type:<4}"
        line += f" {fit(ranks, 7):<7} {format_bytes(told.weight_bytes):>8} {fit(told.why, 10):<10}"
        lines.append(f"{line} {_runner_up(told)}")
    if len(plan.tables) > MAX_TABLES:
        lines.append(f"... and {len(plan.tables) - MAX_TABLES} more tables")
    return lines


def _storage_lines(plan: ShardingPlan) -> list[str]:
    """A line per storage other than the device, with its tables."""
    names: dict[str, list[str]] = {}
    for name, placement in plan.tables.items():
        if placement.storage.kind != "device":
            names.setdefault(placement.storage.label, []).append(name)
    lines = []
    for label, tables in names.items():
        share = f"{len(tables)} of {len(plan.tables)} tables"
        lines.append(fit(f"storage {label}: {share}: {', '.join(tables)}", WIDTH))
    return lines


def _runner_up(told: TableEstimate) -> str:
    if told.runner_up is None or told.runner_up_work_s is None:
        return "-"
    ratio = told.runner_up_work_s / told.work_s if told.work_s else 1.0
    # The ratio has at most four characters, so that no line is longer than the terminal.
    shown = f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}" if ratio < 999.5 else ">1k"
    return f"{told.runner_up} {shown[:4].rstrip('.')}x"
