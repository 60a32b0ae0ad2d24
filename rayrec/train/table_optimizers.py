"""Optimizers of a run's tables, in the form that the sharded model takes."""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.spec.optimizers import SparseOptimizer
from rayrec.train.config import RunOptions


def optimizers_of(
    run: RunOptions, tables: Sequence[BaseEmbeddingConfig]
) -> SparseOptimizer | dict[str, SparseOptimizer]:
    """Return the optimizer of all tables, or one per table where some have their own.

    Raises:
        ConfigError: an optimizer is given for a table that the model does not have.
    """
    own = run.own_optimizers
    if not own:
        return run.tables_optimizer
    names = {table.name for table in tables}
    unknown = sorted(set(own) - names)
    if unknown:
        raise ConfigError(
            f"table_optimizers names the table {unknown[0]!r}; the model's tables are "
            f"{', '.join(sorted(names))}."
        )
    return {name: own.get(name, run.tables_optimizer) for name in names}
