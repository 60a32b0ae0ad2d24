"""Rows of ids from elsewhere become rows of a dynamic table."""

# N ids, D columns of the table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.checkpoint import OverlapWriter, ShardState
from rayrec.distributed.state import TableShards
from rayrec.dynamic.blocks import MOST_HITS
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.resize import begin_anew, places_in, put_values
from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.shards.state import WEIGHT


@dataclass(frozen=True, slots=True, eq=False)
class IdRows:
    """Rows of ids, as `load_table` takes them."""

    weight: Tensor
    ids: Tensor | None
    ages: Tensor | None = None
    hits: Tensor | None = None
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, table: pa.Table, path: str, width: int, states: Sequence[ShardState]) -> IdRows:
        """Take them from the columns of a file.

        Args:
            width: D, of every list.
            states: shards whose optimizer says which columns are its states.
        Raises:
            InputError: the file has no column `id` or `weight`, or not one value or list in a row.
        """
        for column in ("id", WEIGHT):
            if column not in table.column_names:
                raise InputError(
                    f"{path} has columns {table.column_names}; rows of a dynamic table are read "
                    "from columns 'id' and 'weight'."
                )
        names = {name for state in states for name in state.optimizer}
        wanted = {"id", WEIGHT, "age", "hits", *names}
        parts = {
            name: _tensor(table.column(name), width, f"{path}: column {name!r}")
            for name in table.column_names
            if name in wanted
        }
        ids, weight = parts.pop("id"), parts.pop(WEIGHT)
        return cls(weight, ids, parts.pop("age", None), parts.pop("hits", None), parts)

    def check(self, table: str, width: int, states: Sequence[ShardState]) -> Tensor:
        """Check that these are rows of a table, and return the ids.

        Raises:
            InputError, ShapeError: the errors of `load_table`.
        """
        if self.ids is None:
            raise InputError(
                f"table {table!r} is dynamic, so rows are of ids: give ids=, such as "
                "torch.arange(rows) for those of a table of numbered rows."
            )
        given = {"ids": self.ids, "ages": self.ages, "hits": self.hits}
        for name, one in {**given, **self.optimizer}.items():
            if one is not None and not isinstance(one, Tensor):
                kind = type(one).__name__
                raise InputError(f"the {name} for table {table!r} are a {kind}; give a tensor.")
        number = self.ids.shape[0] if self.ids.dim() else 0
        row: tuple[int, ...] = (number,)
        each = number, width
        wanted = [(name, tensor, [row]) for name, tensor in given.items() if tensor is not None]
        wanted.append(("rows", self.weight, [each]))
        wanted += [(name, state, [row, each]) for name, state in self.optimizer.items()]
        for name, tensor, shapes in wanted:
            if tensor.shape not in shapes:
                told = " or ".join(str(shape) for shape in shapes)
                raise ShapeError(
                    f"the {name} for table {table!r} have shape {tuple(tensor.shape)}, not {told}."
                )
        for state in states if self.optimizer else ():
            kinds = {name: tensor.dim() for name, tensor in state.optimizer.items()}
            if kinds != {name: tensor.dim() for name, tensor in self.optimizer.items()}:
                raise InputError(
                    f"the optimizer of table {table!r} has the states {_told(state.optimizer)}, "
                    f"and {_told(self.optimizer)} are given; give all of them, or none for zeros."
                )
        if self.ids.dtype is not torch.int64:
            raise InputError(f"the ids for table {table!r} are {self.ids.dtype}, not torch.int64.")
        if self.ids.unique().numel() != number or bool((self.ids == NO_KEY).any()):
            raise InputError(
                f"the ids for table {table!r} hold {NO_KEY}, which is no id, or one of them twice."
            )
        return self.ids.cpu()


def load_ids(table: TableShards, rows: IdRows, now: Instant) -> tuple[int, int]:
    """Give rows of a dynamic table to ids, and to no others.

    Args:
        now: instant of the table.
    Returns:
        the rows that this rank wrote a part of, and the ids of all ranks that have none.
    Raises:
        ConfigError, InputError, ShapeError: the errors of `load_table`.
    """
    config, states = table.config, table.local()
    ids = rows.check(table.name, config.embedding_dim, states)
    known = _known(table, rows, ids, now)
    places = torch.from_numpy(places_in(config, known, "id", now).places)
    table.begin_overwrite()
    begin_anew(states, {"id": places}, {"id": known})
    data, writer = {WEIGHT: rows.weight, **rows.optimizer}, OverlapWriter()
    put_values(places, range(config.embedding_dim), data, states, writer)
    writer.finish(states)
    # column blocks have the same rows
    ranges = {state.shard.rows for state in states}
    written = sum(int(((places >= own.start) & (places < own.stop)).sum()) for own in ranges)
    return written, int((places == ABSENT).sum())


def _known(table: TableShards, rows: IdRows, ids: Tensor, now: Instant) -> IdColumns:
    """Return what is known of (N,) ids, which may have been seen before the first step."""
    ages = _counts(table.name, "ages", rows.ages, len(ids))
    hits = _counts(table.name, "hits", rows.hits, len(ids))
    assert table.config.dynamic is not None, "the table is dynamic"
    if not table.config.dynamic.uses_time:
        return IdColumns(ids, now.step - ages, hits)
    if now.time == NO_TIME and bool(ages.any()):
        raise ConfigError(
            f"the ids of table {table.name!r} grow old by the time of the data, which none has told"
            " yet, so ages say nothing; set model.id_clocks first, or leave ages out."
        )
    time = (now.time - ages.long()).clamp(min=min(now.time, 0))
    return IdColumns(ids, torch.full_like(ages, now.step), hits, time)


def _counts(table: str, name: str, given: Tensor | None, number: int) -> Tensor:
    """Return (N,) int32 ages or hits."""
    if given is None:
        return torch.zeros(number, dtype=torch.int32)
    if given.is_floating_point() or (
        number and not 0 <= int(given.min()) <= int(given.max()) <= MOST_HITS
    ):
        raise InputError(
            f"the {name} for table {table!r} are not whole numbers from 0 to {MOST_HITS}."
        )
    return given.cpu().to(torch.int32)


def _tensor(column: pa.ChunkedArray, width: int, where: str) -> Tensor:
    """Return the values of a column, as (N, D) where they are lists."""
    array = column.combine_chunks()
    flat, is_list = numbers_of(array, where)
    if is_list and flat.size != len(array) * width:
        raise InputError(
            f"{where} holds {flat.size} values in {len(array)} rows; the table has {width} columns."
        )
    tensor = torch.from_numpy(flat.copy())
    return tensor.view(len(array), width) if is_list else tensor


def numbers_of(array: pa.Array, where: str) -> tuple[NDArray[Any], bool]:
    """Return the numbers of a column, those of all rows after each other, and whether it has lists.

    Raises:
        InputError: it holds others than numbers, or a null.
    """
    kind, t = array.type, pa.types
    is_list = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    leaf = kind.value_type if is_list else kind
    if not t.is_integer(leaf) and not t.is_floating(leaf):
        raise InputError(f"{where} has type {kind}; cast it to numbers, or to lists of them.")
    values = array.flatten() if is_list else array
    if array.null_count or values.null_count:
        raise InputError(f"{where} has rows without a value.")
    return values.to_numpy(zero_copy_only=False), is_list


def _told(states: Mapping[str, Tensor]) -> str:
    kinds = {1: "one value per row", 2: "one per element"}
    return ", ".join(f"{name} ({kinds[t.dim()]})" for name, t in states.items()) or "none"
