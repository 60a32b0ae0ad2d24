"""Changes from one plan to another, for people: kinds, and the rectangles that move.

A rectangle moves where a rank of the new plan holds what it did not hold in the old one. Cost:
shards before x shards after, per table that changed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.layout.geometry import Replicated, Shard
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.layout.units import format_bytes, format_count

MAX_MOVES = 8  # rectangles told per table; the rest is a number


def moved_shards(
    name: str, before: TablePlacement, after: TablePlacement
) -> tuple[tuple[Shard, int], ...]:
    """The rectangles of `after` that move, each with the rank that sends it.

    Those move whose rank did not hold them in `before`. A rectangle is sent by its owner there, one
    of a replicated table by the first replica.
    """
    sources = before.layout.shards(name)
    # Every replica holds the whole table, so a rank that has one needs nothing sent.
    holders: set[int] = set()
    if isinstance(before.layout, Replicated):
        holders = set(before.layout.ranks)
        sources = sources[:1]
    moves = []
    for want in after.layout.shards(name):
        for have in sources:
            common = want.intersect(have)
            if common and want.rank != have.rank and want.rank not in holders:
                moves.append((Shard(name, *common, want.rank), have.rank))
    return tuple(moves)


def diff_plans(
    before: ShardingPlan, after: ShardingPlan, tables: Sequence[BaseEmbeddingConfig] | None = None
) -> str:
    """The difference as text, one paragraph per changed table.

    Args:
        tables: the model's tables; with them, amounts are bytes of weights instead of elements.
    """
    if before == after:
        return "The plans are equal."
    element_bytes = {table.name: table.data_type.num_bytes for table in tables or ()}
    lines = []
    if before.world_size != after.world_size:
        lines.append(f"ranks: {before.world_size} -> {after.world_size}")
    if before.hosts != after.hosts:
        sizes = [list(map(len, plan.hosts)) for plan in (before, after)]
        lines.append(f"hosts: {sizes[0]} -> {sizes[1]} ranks each")
    if list(before.tables) != list(after.tables) and set(before.tables) == set(after.tables):
        lines.append("tables: the same in another order")
    every = list(dict.fromkeys([*before.tables, *after.tables]))
    changed = [name for name in every if before.tables.get(name) != after.tables.get(name)]
    for name in changed:
        if name not in after.tables:
            lines.append(f"{name}: removed (was {before.kind(name)})")
        elif name not in before.tables:
            lines.append(f"{name}: added as {after.kind(name)}")
        else:
            lines += _table_lines(name, before, after, element_bytes.get(name))
    lines.append(f"{len(changed)} of {len(every)} tables change.")
    return "\n".join(lines)


def _table_lines(
    name: str, before: ShardingPlan, after: ShardingPlan, element_bytes: int | None
) -> list[str]:
    old, new = before.tables[name], after.tables[name]
    head = f"{name}: {before.kind(name)} -> {after.kind(name)}"
    if old.storage != new.storage:
        head += f", storage {old.storage.label} -> {new.storage.label}"
    # Rectangles of tables of two sizes cannot be compared: the table is another one.
    if old.layout.shape != new.layout.shape:
        (r0, c0), (r1, c1) = old.layout.shape, new.layout.shape
        return [f"{head}, resized {r0} x {c0} -> {r1} x {c1}"]
    moves = moved_shards(name, old, new)
    amounts = [len(shard.rows) * len(shard.cols) for shard, _ in moves]
    moving = f"{_amount(sum(amounts), element_bytes)} in {len(moves)} rectangles move"
    lines = [f"{head}, {moving if moves else 'nothing moves'}"]
    for (shard, source), amount in list(zip(moves, amounts, strict=True))[:MAX_MOVES]:
        rows, cols = shard.rows, shard.cols
        where = f"rows {rows.start}:{rows.stop} cols {cols.start}:{cols.stop}"
        shown = _amount(amount, element_bytes)
        lines.append(f"    {where}  rank {source} -> {shard.rank}  {shown}")
    if len(moves) > MAX_MOVES:
        lines.append(f"    ... and {len(moves) - MAX_MOVES} more")
    return lines


def _amount(elements: int, element_bytes: int | None) -> str:
    if element_bytes is None:
        return f"{format_count(elements)} elements"
    return format_bytes(elements * element_bytes)
