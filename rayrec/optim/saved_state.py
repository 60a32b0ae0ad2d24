"""The part of a shard in saved optimizer state, whose names may be TorchRec's.

TorchRec names the first state of a kernel "momentum1" and the second as torch does; its fused
collections count "momentum_1", "momentum_2". Its sharded models save `ShardedTensor`s, of which a
rank holds the parts that its plan gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from rayrec.errors import CheckpointError
from rayrec.layout import Shard

# kernel's name -> that of a fused optimizer's state_dict, where they differ
FUSED_NAMES = {"momentum2": "exp_avg_sq"}
_ALIASES = {
    "momentum1": "momentum1",
    "momentum_1": "momentum1",
    "exp_avg": "momentum1",
    "momentum2": "exp_avg_sq",
    "momentum_2": "exp_avg_sq",
}


def state_of_shard(
    shard: Shard, saved: Mapping[str, Any], table: tuple[int, int] | None
) -> dict[str, Any]:
    """Return a shard's state by the names of its fused optimizer.

    Args:
        saved: state of the shard, or of its whole table, by any of the names above.
        table: rows and columns of the whole table; None where only a shard's own state is taken.
    Raises:
        CheckpointError: a `ShardedTensor` was saved under another plan.
    """
    found = {}
    for key, value in saved.items():
        name = key.rpartition(".")[2]
        found[f"{shard.table}.{_ALIASES.get(name, name)}"] = _part(shard, key, value, table)
    return found


def _part(shard: Shard, key: str, value: Any, table: tuple[int, int] | None) -> Any:
    if not isinstance(value, Tensor | ShardedTensor) or table is None:
        return value
    spans = (shard.rows, shard.cols)[: len(value.size())]
    if isinstance(value, ShardedTensor):
        start, size = [span.start for span in spans], [len(span) for span in spans]
        for part in value.local_shards():
            if part.metadata.shard_offsets == start and list(part.tensor.shape) == size:
                return part.tensor
        raise CheckpointError(
            f"state {key!r} holds no part of {size} values at {start} on this rank, which table "
            f"{shard.table!r} needs; it was saved under another plan. Gather the whole tensor on "
            "every rank, and load that."
        )
    if not spans or tuple(value.shape) != table[: len(spans)]:
        return value
    return value[tuple(slice(span.start, span.stop) for span in spans)]
