"""What changes from one plan to another, for people: kinds before and after, and the rectangles
that move to another rank.

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
    """The rectangles of `after` whose rank did not hold them in `before`, each with the rank that
    sends it.

    A rectangle is taken from its owner in `before`; a replicated table is taken from its first
    replica.
    """
    old, new = before.layout.shards(name), after.layout.shards(name)
    sources = old[:1] if isinstance(before.layout, Replicated) else old
    held = {shard.rank for shard in old} if isinstance(before.layout, Replicated) else set()
    out = []
    for want in new:
        for have in sources:
            common = want.intersect(have)
            if common and want.rank != have.rank and want.rank not in held:
                out.append((Shard(name, *common, want.rank), have.rank))
    return tuple(out)


def diff_plans(
    before: ShardingPlan, after: ShardingPlan, tables: Sequence[BaseEmbeddingConfig] | None = None
) -> str:
    """The difference as text, one paragraph per changed table; "The plans are equal." when there is
    none.

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
        lines.append(
            f"hosts: {[len(h) for h in before.hosts]} -> {[len(h) for h in after.hosts]} ranks each"
        )
    if list(before.tables) != list(after.tables) and set(before.tables) == set(after.tables):
        lines.append("tables: the same in another order")
    changed = 0
    for name in [*before.tables, *(name for name in after.tables if name not in before.tables)]:
        if name not in after.tables:
            text = [f"{name}: removed (was {before.kind(name)})"]
        elif name not in before.tables:
            text = [f"{name}: added as {after.kind(name)}"]
        elif before.tables[name] != after.tables[name]:
            text = _table_lines(name, before, after, element_bytes.get(name))
        else:
            continue
        changed += 1
        lines += text
    lines.append(f"{changed} of {len(set(before.tables) | set(after.tables))} tables change.")
    return "\n".join(lines)


def _table_lines(
    name: str, before: ShardingPlan, after: ShardingPlan, element_bytes: int | None
) -> list[str]:
    old, new = before.tables[name], after.tables[name]
    head = f"{name}: {before.kind(name)} -> {after.kind(name)}"
    if old.storage != new.storage:
        head += f", storage {old.storage.label} -> {new.storage.label}"
    if old.layout.shape != new.layout.shape:
        (r0, c0), (r1, c1) = old.layout.shape, new.layout.shape
        return [f"{head}, resized {r0} x {c0} -> {r1} x {c1}"]
    moves = moved_shards(name, old, new)
    amounts = [len(shard.rows) * len(shard.cols) for shard, _ in moves]
    head += (
        f", {_amount(sum(amounts), element_bytes)} in {len(moves)} rectangles move"
        if moves
        else ", nothing moves"
    )
    lines = [head]
    for (shard, source), amount in list(zip(moves, amounts, strict=True))[:MAX_MOVES]:
        where = (
            f"rows {shard.rows.start}:{shard.rows.stop} cols {shard.cols.start}:{shard.cols.stop}"
        )
        lines.append(
            f"    {where}  rank {source} -> {shard.rank}  {_amount(amount, element_bytes)}"
        )
    if len(moves) > MAX_MOVES:
        lines.append(f"    ... and {len(moves) - MAX_MOVES} more")
    return lines


def _amount(elements: int, element_bytes: int | None) -> str:
    return (
        f"{format_count(elements)} elements"
        if element_bytes is None
        else format_bytes(elements * element_bytes)
    )
