"""What ranks know of the ids of dynamic tables in the end, put together and compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rayrec.dynamic.columns import lanes_of
from rayrec.shards.state import ShardState

Known = dict[str, dict[int, dict[Any, Any]]]  # table -> id -> what is known of it by name
COUNTERS = ("seen", "hits", "time")


def known_ids(states: Iterable[ShardState]) -> Known:
    """What shards know: of every id its values and optimizer state by column and its counters, and
    beside each table, of every candidate the counters.
    """
    known: Known = {}
    for state in states:
        part = known.setdefault(state.shard.table, {})
        keys = state.ids["id_key"] if state.ids else torch.tensor(state.shard.rows)
        for row, key in enumerate(keys.tolist()):
            if key != -1:
                told = part.setdefault(key, {})
                told |= {c: state.weight[row, i].item() for i, c in enumerate(state.shard.cols)}
                for name, tensor in state.optimizer.items():
                    values = tensor[row].view(-1).tolist()
                    of_columns = len(values) == len(state.shard.cols)
                    where = state.shard.cols if of_columns else range(len(values))
                    told |= {(name, c): v for c, v in zip(where, values, strict=True)}
                for name, column in state.ids.items():
                    told[name] = column[row].item() if name.startswith("id") else 0
        for lane in lanes_of("candidate", state.ids):
            waiting = known.setdefault(candidates_of(state.shard.table), {})
            names = [name for name in COUNTERS if f"{lane}_{name}" in state.ids]
            columns = [state.ids[f"{lane}_{name}"].tolist() for name in names]
            for key, *told in zip(state.ids[f"{lane}_key"].tolist(), *columns, strict=True):
                if key != -1:
                    found = dict(zip(names, told, strict=True))
                    # shards with other columns of the rows tell the same
                    assert waiting.setdefault(key, found) == found
    return known


def candidates_of(table: str) -> str:
    """The name of the candidates of a table."""
    return f"candidates of {table}"


def check_equal(found: Known, wanted: Known) -> None:
    """Ids and counters are equal, values and optimizer state up to rounding."""
    assert found.keys() == wanted.keys()
    for table, rows in wanted.items():
        assert found[table].keys() == rows.keys()
        for key, told in rows.items():
            other = found[table][key]
            assert other.keys() == told.keys()
            for name, value in told.items():
                assert other[name] == (
                    value if isinstance(value, int) else pytest.approx(value, rel=1e-4, abs=1e-5)
                )


def check_same_bits(found: Known, wanted: Known) -> None:
    """All that is known of all ids is equal."""
    check_equal(found, wanted)  # which says more shortly what is not
    assert [
        (table, key, name, found[table][key][name], value)
        for table, rows in wanted.items()
        for key, told in rows.items()
        for name, value in told.items()
        if found[table][key][name] != value
    ] == []
