"""Findings on a table: what its numbers ask for, and what to do about it.

The bounds are rules of thumb, chosen so that a sound run has no finding; docs/doctor.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rayrec.doctor.table_health import Finding, TableHealth, percent

DEAD = 0.5  # share of the rows
HOT = 0.1  # of the most used id in all uses
IDLE = 0.5  # share of the ids
FULL, EMPTY = 0.98, 0.1  # share of the rows that are in use
REFUSED = 0.01  # of the ids that asked for a row
RETURNED = 0.1  # of the ids that lost their row
COLLIDED = 0.2  # of the hashed values
COARSE = 0.02  # error of INT8 rows; that of even values is about 0.005

_DIVERGED = (
    "The model has diverged: go on from an earlier checkpoint with a lower rate of the tables, or "
    "clip gradients."
)
ADVICE = {
    "NaN rows": _DIVERGED,
    "infinite rows": _DIVERGED,
    "frozen table": "Look whether its features have ids in the data, whether the model uses their "
    "output, and whether the table's rate is 0.",
    "huge rows": "Look at how often these ids occur, and lower the rate of the tables.",
    "dead rows": "Give the table fewer rows, or make it dynamic, so that only ids that come have "
    "one; give a dynamic one a higher admission_threshold.",
    "unmoved rows": "Updates are too small for the type of the rows: raise the table's rate, or "
    "take FP32.",
    "zero rows": "Look whether they were loaded so. A product with such a row has no gradient for "
    "the other, and LAMB and LARS never move it.",
    "hot id": "Look whether it stands for a missing value; then leave the bag empty instead. "
    "Otherwise replicate the table or cut it by columns, so that no rank has all of it.",
    "stale ids": "Give the table ttl_steps or ttl_s, so that old ids make room, or fewer rows.",
    "collisions": "Raise hash_buckets and num_embeddings, or make the table dynamic and leave "
    "hash_buckets out.",
    "full table": "Give it more rows, growth, or a higher admission_threshold.",
    "empty table": "Give the table fewer rows.",
    "refused ids": 'Give the table more rows or growth, or another eviction than "none".',
    "eviction regret": 'Give the table more rows, or choose another eviction, such as "lfu".',
    "coarse in INT8": "Export the table as fp16 (--table NAME=fp16), and compare the scores.",
}
GRAVE = "NaN rows", "infinite rows", "frozen table"


def findings_on(table: TableHealth) -> Iterator[Finding]:
    """Yield the findings on a table."""
    for rules in (_of_values, _of_training, _of_uses, _of_ids):
        for kind, says in rules(table):
            examples = ", ".join(map(str, table.examples.get(kind, ())))
            if examples:
                says = f"{says}, such as {'rows' if table.blocks is None else 'ids'} {examples}"
            yield Finding(table.name, kind, says, ADVICE[kind], kind in GRAVE)


def _of_values(table: TableHealth) -> Iterator[tuple[str, str]]:
    if table.nan_rows:
        yield "NaN rows", f"{table.nan_rows:,} of {table.in_use:,} rows hold a NaN"
    if table.infinite_rows:
        yield "infinite rows", f"{table.infinite_rows:,} of {table.in_use:,} rows hold an infinity"
    if table.huge_rows:
        says = f"{table.huge_rows:,} rows have a norm of {table.huge_norm:.3g} or more, of at most"
        yield "huge rows", f"{says} {table.norm_max:.3g}; the median is {table.norm_median:.3g}"
    if table.error_int8 is not None and table.error_int8 >= COARSE:
        yield "coarse in INT8", f"INT8 rows are off by {percent(table.error_int8)} of the values"


def _of_training(table: TableHealth) -> Iterator[tuple[str, str]]:
    rows, dead = f"{table.in_use:,} rows", table.dead_rows
    if table.in_use and table.in_use == table.first_rows:
        yield "frozen table", f"all {rows} are as they began"
        return
    if table.in_use and table.in_use == dead:
        yield "frozen table", f"no gradient has reached any of {rows}"
        return
    if dead and dead >= DEAD * table.in_use:
        share = percent(dead / table.in_use)
        yield "dead rows", f"no gradient has reached {dead:,} of {rows} ({share})"
    if table.unmoved_rows:
        says = f"gradients have reached {table.unmoved_rows:,} rows that are as they began"
        yield "unmoved rows", says
    if table.zero_rows:
        yield "zero rows", f"{table.zero_rows:,} of {rows} are zeros"


def _of_uses(table: TableHealth) -> Iterator[tuple[str, str]]:
    # in a table of a few rows every row has a large share
    if table.hottest_1 is not None and table.hottest_1 >= HOT and table.in_use > 1 / HOT:
        named = f"{'row' if table.blocks is None else 'id'} {table.hottest_id}"
        yield "hot id", f"{named} has {percent(table.hottest_1)} of all {table.heat}"
    if table.idle_rows and table.idle_rows >= IDLE * table.in_use:
        says = f"{table.idle_rows:,} of {table.in_use:,} ids were last seen in the first half"
        yield "stale ids", f"{says} of the steps, the median {table.age_median:,.0f} steps ago"
    if table.collided is not None and table.collided >= COLLIDED:
        says = f"about {table.distinct_values:,.0f} values or more were hashed, and"
        yield "collisions", f"{says} {percent(table.collided)} of them share a row with another"


def _of_ids(table: TableHealth) -> Iterator[tuple[str, str]]:
    if table.blocks is not None and table.full_blocks is not None:
        fill = table.in_use / table.rows
        says = f"{table.in_use:,} of {table.rows:,} rows belong to ids ({percent(fill)})"
        if fill >= FULL or 2 * table.full_blocks > table.blocks:
            yield "full table", f"{says}, {table.full_blocks} of {table.blocks} blocks are full"
        elif fill < EMPTY:
            yield "empty table", says
    if table.refused and table.refused >= REFUSED * (table.refused + (table.admitted or 0)):
        says = f"ids were refused a row {table.refused:,} times"
        yield "refused ids", f"{says}, and were given one {table.admitted:,} times"
    if table.lost_ids and table.returned_ids and table.returned_ids >= RETURNED * table.lost_ids:
        says = f"of {table.lost_ids:,} ids that lost their row, {table.returned_ids:,} had to get"
        yield "eviction regret", f"{says} one again by the next checkpoint"
