"""Names of the outputs of an embedding collection, and checks of its tables.

A feature looked up in one table gives an output of its own name; a feature of several tables gives
one output per table, `feature@table`. Outputs come in the order of tables, and within a table in
the order of its features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from rayrec.errors import ConfigError
from rayrec.layout.tables import BaseEmbeddingConfig, DataType, check_tables

# why a collection by itself looks up no dynamic table
UNSHARDED = (
    "DistributedModelParallel gives its ids their rows; put the model into one, also on one rank"
)
DTYPES = {kind: getattr(torch, kind.torch_name) for kind in DataType}


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Output names of each table's features, in the table's feature order."""
    uses = Counter(feature for table in tables for feature in table.feature_names)
    names = []
    for table in tables:
        long = [f"{feature}@{table.name}" for feature in table.feature_names]
        pairs = zip(table.feature_names, long, strict=True)
        names.append([name if uses[feature] > 1 else feature for feature, name in pairs])
    return names


def torch_dtype(table: BaseEmbeddingConfig) -> torch.dtype:
    """dtype of a table's rows."""
    return DTYPES[table.data_type]


def check_module_names(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Check that the tables are sound and that their names can name submodules.

    Raises:
        ConfigError: names the table.
    """
    check_tables(tables)
    for table in tables:
        if "." in table.name or hasattr(nn.ModuleDict(), table.name):
            raise ConfigError(
                f"table {table.name!r} cannot name a torch module: no dots, and not an attribute "
                "of nn.ModuleDict. Rename it."
            )
