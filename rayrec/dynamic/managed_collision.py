"""Ids that TorchRec's managed collisions hold, read from a state_dict.

`MCHManagedCollisionModule` keeps for each of its places a raw id in `_mch_sorted_raw_ids`, the
largest number of 64 bits where there is none, and the row that the id has in
`_mch_remapped_ids_mapping`; by its policy also `_mch_counts`, and `_mch_last_access_iter`, which
counts as `_current_iter_tensor` does (torchrec/modules/mc_modules.py of TorchRec 1.8).
`HashZchManagedCollisionModule`, MPZCH, keeps in `_hash_zch_identities` the id of each row, -1 where
there is none; with an eviction policy also `_hash_zch_metadata`, the hour in which the row may go;
with `track_id_freq` `_hash_zch_runtime_meta`, the times that it was looked up
(torchrec/modules/hash_mc_modules.py and hash_mc_evictions.py).
"""

# N ids, P places

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayrec.dynamic.blocks import MOST_HITS
from rayrec.dynamic.columns import NO_KEY
from rayrec.errors import ConfigError, InputError

_MODULES = "_managed_collision_modules"
_NO_RAW_ID = torch.iinfo(torch.int64).max


class ManagedIds(NamedTuple):
    """What a managed collision module knows, as `load_table` takes it.

    Attributes:
        ids: (N,) int64.
        rows: (N,) int64 row of each in the table of the module.
        ages: (N,) int64 steps since each was seen; None where the module does not say.
        hits: (N,) int64 times that each was seen; None where the module does not say.
    """

    ids: Tensor
    rows: Tensor
    ages: Tensor | None
    hits: Tensor | None


def managed_collision_ids(
    state_dict: Mapping[str, Any], table: str, *, steps_per_hour: int | None = None
) -> ManagedIds:
    """Return the ids of a table of a TorchRec model with managed collisions.

    An id of -1 is left out, since it is none here, and so is the row that unknown ids share there.
    Where MCH had an `input_hash_func`, the ids are what it gave.

    Args:
        state_dict: of the unsharded model, or one with its keys and whole tensors, as
            torch.distributed.checkpoint loads it.
        steps_per_hour: training steps that an hour of MPZCH counts as, or seconds where the table
            goes by the time of the data; 1 unless given, which keeps the order of ages. Rows that
            would go sooner count as older.
    Raises:
        InputError: no managed collisions of the table, or tensors of other shapes than TorchRec's.
        ConfigError: `steps_per_hour` is below 1, or was given for MCH, which counts steps.
    """
    buffers = _buffers(state_dict, table)
    if "_mch_sorted_raw_ids" in buffers:
        if steps_per_hour is not None:
            raise ConfigError(
                f"table {table!r} has the buffers of MCH, which counts steps, so steps_per_hour "
                "has no meaning; leave it out."
            )
        return _of_mch(buffers, table)
    steps = 1 if steps_per_hour is None else steps_per_hour
    if steps < 1:
        raise ConfigError(f"steps_per_hour={steps}; it must be at least 1.")
    return _of_mpzch(buffers, table, steps)


def _of_mch(buffers: Mapping[str, Tensor], table: str) -> ManagedIds:
    raw = _column(buffers, "_mch_sorted_raw_ids", table)
    rows = _column(buffers, "_mch_remapped_ids_mapping", table, like=raw)
    held = (raw != _NO_RAW_ID) & (raw != NO_KEY)
    ages = hits = None
    if "_mch_last_access_iter" in buffers:
        now = int(_column(buffers, "_current_iter_tensor", table)[0])
        last = _column(buffers, "_mch_last_access_iter", table, like=raw)
        ages = (now - last[held]).clamp(min=0)
    if "_mch_counts" in buffers:
        hits = _column(buffers, "_mch_counts", table, like=raw)[held].clamp(0, MOST_HITS)
    return ManagedIds(raw[held], rows[held], ages, hits)


def _of_mpzch(buffers: Mapping[str, Tensor], table: str, steps_per_hour: int) -> ManagedIds:
    identities = _column(buffers, "_hash_zch_identities", table)
    (rows,) = (identities != NO_KEY).nonzero(as_tuple=True)
    ages = hits = None
    if "_hash_zch_metadata" in buffers:
        hours = _column(buffers, "_hash_zch_metadata", table, like=identities)[rows]
        ages = (hours.max() - hours) * steps_per_hour if len(rows) else hours
        ages = ages.clamp(max=MOST_HITS)
    if "_hash_zch_runtime_meta" in buffers:
        counts = _column(buffers, "_hash_zch_runtime_meta", table, like=identities)
        hits = counts[rows].clamp(0, MOST_HITS)
    return ManagedIds(identities[rows], rows, ages, hits)


def _buffers(state_dict: Mapping[str, Any], table: str) -> dict[str, Tensor]:
    """Return the buffers of the module of a table by their own names."""
    owner = f"{_MODULES}.{table}"
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        path, _, name = key.rpartition(".")
        if path == owner or path.endswith(f".{owner}"):
            found.setdefault(path, {})[name] = value
    modules = {
        path: buffers
        for path, buffers in found.items()
        if "_mch_sorted_raw_ids" in buffers or "_hash_zch_identities" in buffers
    }
    if len(modules) != 1:
        what = "several" if modules else "no"
        raise InputError(
            f"the state_dict has {what} managed collisions of table {table!r}: there should be "
            f"keys such as '..{owner}._mch_sorted_raw_ids' or '..{owner}._hash_zch_identities', "
            "of one module."
        )
    return next(iter(modules.values()))


def _column(
    buffers: Mapping[str, Tensor], name: str, table: str, like: Tensor | None = None
) -> Tensor:
    """Return a buffer as (P,) int64; TorchRec keeps some as (P, 1).

    Args:
        like: another column of the same length.
    """
    value = buffers.get(name)
    # a ShardedTensor is a Tensor, and what a rank holds of it is no whole column
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise InputError(
            f"{name!r} of table {table!r} is {type(value).__name__}; a whole tensor is wanted. "
            "Load the checkpoint into the unsharded model first."
        )
    assert value is not None, "it is a tensor"
    is_column = value.dim() == 1 or (value.dim() == 2 and value.shape[1] == 1)
    if not is_column or (like is not None and value.numel() != like.numel()):
        wanted = "(P,) or (P, 1)" if like is None else f"({like.numel()},) or ({like.numel()}, 1)"
        raise InputError(
            f"{name!r} of table {table!r} has shape {tuple(value.shape)}, not {wanted}; a "
            "'_hash_zch_runtime_meta' of several columns holds no counts: leave its key out."
        )
    return value.detach().cpu().reshape(-1).long()
