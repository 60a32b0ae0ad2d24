"""What dynamic tables cannot do yet, told before rows are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.layout.tables import refuse_dynamic


def check_dynamic(
    collections: Sequence[CollectionSpec],
    options: EngineOptions,
    device: torch.device,
    has_replicas: bool,
) -> None:
    """Refuse dynamic tables where their rows would be wrong.

    Raises:
        ConfigError: names the first dynamic table, what does not go with it, and what to do.
    """
    tables = [table for spec in collections for table in spec.tables]
    for holds, why in (
        (
            device.type != "cpu",
            f"the rows lie on {device}: the ids are mapped on the CPU; train on CPU ranks",
        ),
        (
            has_replicas,
            "there are replicas (sharding_group_size), which would admit ids apart from each "
            "other; leave it out",
        ),
        (
            options.dedup_sequences,
            "ids are sent once per batch (dedup_sequences), and their counts decide who gets a "
            "row; leave it out",
        ),
    ):
        if holds:
            refuse_dynamic(tables, why)
