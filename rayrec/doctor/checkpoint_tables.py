"""Numbers of the tables of a checkpoint, with what its run and its recipe know of them.

A thread reads and verifies the next part of a table while this one is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import log, log1p
from typing import Any, TypeVar

from rayrec.checkpoint import CheckpointManager, Manifest, TableReader, check_dense, read_manifest
from rayrec.checkpoint.entries import TableEntry
from rayrec.doctor.first_rows import FirstRows, first_rows, hashed_buckets, recipe_of_checkpoint
from rayrec.doctor.history import id_counts, lost_ids
from rayrec.doctor.measure import TableMeasure
from rayrec.doctor.table_health import TableHealth
from rayrec.dynamic.clock import Instant, clocks_in
from rayrec.layout.schema import FeatureSchema
from rayrec.quant import QuantType
from rayrec.shards.state import HITS

HUGE = 100.0  # times the median norm
_PACKED = {"BF16": "FP16"}  # the types of tables that none of packed rows has
_SUMS = ("rowwise_adagrad", "adagrad")  # optimizers whose state grows with every use
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the tables of a checkpoint beside their rows.

    Attributes:
        first: first rows by table, or why they are not known.
        newest: the three newest checkpoints of the run until this one; fewer where it has fewer.
    """

    manifest: Manifest
    first: Mapping[str, FirstRows | str]
    schema: FeatureSchema | None
    counts: Mapping[str, Counter[str]]
    newest: tuple[str, ...]


def checkpoint_tables(path: str) -> tuple[list[TableHealth], int]:
    """Return the numbers of all tables of a checkpoint, and its step."""
    manifest = read_manifest(path)
    recipe = recipe_of_checkpoint(manifest, path)
    run = path.rstrip("/").rpartition("/")[0]
    manager = CheckpointManager(run)
    is_of_run = manager.step_of(path) == manifest.step
    until = [step for step in manager.steps() if step <= manifest.step] if is_of_run else []
    known = _Known(
        manifest,
        first_rows(manifest, recipe),
        None if recipe is None else FeatureSchema.from_json(recipe.schema, f"schema of {path}"),
        id_counts(run, manifest.step) if is_of_run else {},
        tuple(map(manager.path, until[-3:])),
    )
    reader = TableReader(path, manifest)
    check_dense(path)
    return [_examined(reader, table, known) for table in manifest.tables], manifest.step


def _examined(reader: TableReader, table: TableEntry, known: _Known) -> TableHealth:
    first = known.first[table.name]
    optimizer = known.manifest.optimizers.get(table.name, {}).get("name")
    configs = known.schema.tables if table.blocks and known.schema is not None else ()
    measure = TableMeasure(
        first=None if isinstance(first, str) else first,
        heat=HITS if table.blocks else "momentum1" if optimizer in _SUMS else None,
        now=clocks_in(known.manifest.extras).get(table.name, Instant()),
        block_rows=table.num_embeddings // (table.blocks or 1),
        rules=next((config for config in configs if config.name == table.name), None),
    )
    for rows, data in _ahead(reader.parts(table.name)):
        measure.add(rows, data)
    why = dict[str, str]()
    told = _changes(measure, first, why)
    told |= _uses(measure, bool(table.blocks), why)
    told |= _ids(measure, known, table, why)
    told |= _collisions(known, table, told["dead_rows"], why)
    shape = table.num_embeddings, table.embedding_dim
    return health_of(measure, table.name, shape, table.data_type, not_told=why, **told)


def health_of(
    measure: TableMeasure, name: str, shape: tuple[int, int], data_type: str, **told: Any
) -> TableHealth:
    """Return the numbers of a table: those that follow from its rows alone, and other fields."""
    median = measure.norms.quantile(0.5)
    huge, limit = measure.norms.from_about(HUGE * median) if median else (0, None)
    largest = measure.largest.values
    examples = {
        "NaN rows": measure.nan.examples,
        "infinite rows": measure.infinite.examples,
        "zero rows": measure.zero.examples,
        "dead rows": measure.dead.examples or measure.still_first.examples,
        "huge rows": measure.largest.names[: min(huge, 3)].tolist(),
    }
    errors = measure.rounding(QuantType[_PACKED.get(data_type, data_type)])
    return TableHealth(
        name=name,
        rows=shape[0],
        width=shape[1],
        data_type=data_type.lower(),
        in_use=measure.in_use,
        zero_rows=measure.zero.count,
        nan_rows=measure.nan.count,
        infinite_rows=measure.infinite.count,
        huge_rows=huge,
        huge_norm=limit if huge else None,
        norm_median=median,
        norm_p99=measure.norms.quantile(0.99),
        norm_max=float(largest[0]) if len(largest) else None,
        octaves=measure.norms.octaves(),
        examples={kind: some for kind, some in examples.items() if some},
        **errors,
        **told,
    )


def _changes(
    measure: TableMeasure, first: FirstRows | str, why: dict[str, str]
) -> dict[str, int | None]:
    """Return dead rows and those at their first value, where they are known."""
    dead = measure.dead.count if measure.has_state else None
    # rows that no gradient has reached are what they were at the start
    if dead and measure.began_otherwise == dead and not isinstance(first, str):
        first = "the rows began otherwise, as after init_from or new_data"
    if isinstance(first, str):
        why["first values"] = first
        if dead is None:
            why["dead rows"] = "its optimizer has no state, and first values are not known"
        return {"dead_rows": dead}
    still = measure.still_first.count
    if dead is None:
        return {"dead_rows": still, "first_rows": still}
    return {"dead_rows": dead, "first_rows": still, "unmoved_rows": measure.unmoved}


def _uses(measure: TableMeasure, is_dynamic: bool, why: dict[str, str]) -> dict[str, Any]:
    """Return the shares of the hottest rows, and how long ids were not seen."""
    told: dict[str, Any] = {}
    hottest = measure.hottest
    if hottest.sum > 0:
        told = {f"hottest_{count}": hottest.share(count) for count in (1, 10, 100)}
        told["hottest_id"] = int(hottest.names[0])
        told["heat"] = "look-ups" if is_dynamic else "squared gradients"
    else:
        why["hottest ids"] = "no row was used, or no optimizer keeps a sum that grows with uses"
    if is_dynamic:
        ages = measure.ages
        told |= {"idle_rows": measure.idle}
        told |= {"age_median": ages.quantile(0.5), "age_p90": ages.quantile(0.9)}
    return told


def _ids(
    measure: TableMeasure, known: _Known, table: TableEntry, why: dict[str, str]
) -> dict[str, Any]:
    """Return how full a dynamic table is, and what its run tells of ids that came and went."""
    if not table.blocks:
        kinds = "stale ids", "fill", "refused ids", "eviction regret"
        why |= dict.fromkeys(kinds, "the table is not dynamic")
        return {}
    told: dict[str, Any] = {"blocks": table.blocks, "full_blocks": measure.full_blocks}
    if table.name in known.counts:
        told |= known.counts[table.name]
    else:
        why["refused ids"] = "there are no events of its run beside it"
    lost = lost_ids(known.newest, table.name)
    if lost is None:
        why["eviction regret"] = "its run does not keep three checkpoints of the table until it"
    else:
        told |= lost
    return told


def _collisions(
    known: _Known, table: TableEntry, dead: int | None, why: dict[str, str]
) -> dict[str, Any]:
    """Estimate how many values were hashed, and the share of them that do not have a row alone.

    Of n values in B buckets a bucket stays empty with the chance (1 - 1 / B)^n; how many are empty
    tells n, by linear counting.
    """
    buckets = None if known.schema is None else hashed_buckets(known.schema, table.name)
    if buckets is None or dead is None:
        unknown = "it is not known which rows are used"
        unhashed = "nothing says that its ids are hashed into buckets"
        why["collisions"] = unhashed if buckets is None else unknown
        return {}
    # with no bucket empty, there are at least as many values as with half of one
    empty = max(buckets - max(table.num_embeddings - dead, 0), 0.5)
    values = log(empty / buckets) / log1p(-1 / buckets)
    return {"distinct_values": values, "collided": 1 - (1 - 1 / buckets) ** max(values - 1, 0)}


def _ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, of which the next is made in a thread meanwhile."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="doctor") as pool:
        pending = pool.submit(next, iterator, None)
        while (item := pending.result()) is not None:
            pending = pool.submit(next, iterator, None)
            yield item
