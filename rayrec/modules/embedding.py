"""`EmbeddingCollection`: unpooled lookups of a KeyedJaggedTensor in whole tables, in torch.

Each id becomes one row; the bags keep their lengths. The reference of the sharded sequence
collections, and usable alone. Rows are returned in float32 whatever the storage. Cost: one gather
per feature and autograd's dense gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError
from rayrec.layout.tables import EmbeddingConfig, refuse_dynamic
from rayrec.modules import init
from rayrec.modules.embedding_bag import whole_ids
from rayrec.modules.names import (
    UNSHARDED,
    check_module_names,
    get_embedding_names_by_table,
    torch_dtype,
)
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, check_ids


class EmbeddingCollection(nn.Module):
    """Unpooled embeddings of many features, one parameter `embeddings.<table>.weight` per table.

    Args:
        tables: tables to look up; names are unique, widths are equal.
        device: device of the parameters; "meta" allocates nothing. Default is torch's default
            device.
        need_indices: True makes the outputs carry the looked-up ids as their weights.
    Raises:
        ConfigError: the tables contradict themselves, or an `init_fn` cannot be done for a part of
            a table or differ in width.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        check_module_names(tables)
        for table in tables:
            init.check_init_fn(table)
        for table in tables:
            if table.embedding_dim != tables[0].embedding_dim:
                raise ConfigError(
                    f"table {table.name!r} has embedding_dim={table.embedding_dim}, table "
                    f"{tables[0].name!r} {tables[0].embedding_dim}; all tables of an "
                    "EmbeddingCollection have one width. Make one collection per width."
                )
        self._tables, self._need_indices = list(tables), need_indices
        self._names = get_embedding_names_by_table(tables)
        self._device = torch.empty(0, device=device).device
        self.embeddings = nn.ModuleDict()
        for table in tables:
            shape = (table.num_embeddings, table.embedding_dim)
            weight = torch.empty(shape, dtype=torch_dtype(table), device=device)
            self.embeddings[table.name] = nn.Embedding(*shape, _weight=weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all tables with initial values of seed `torch.initial_seed()`, but not on meta."""
        for table in self._tables:
            weight = self.embeddings[table.name].weight
            assert isinstance(weight, Tensor)
            init.fill(weight, torch.initial_seed(), table)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id of every feature.

        Args:
            features: a batch with a key for every feature of the tables; more keys do no harm.
        Returns:
            output name -> bags of (N, D) float32 rows, with the lengths of the feature; weights are
            the ids when need_indices.
        Raises:
            UnknownKeyError: the batch misses a feature.
            ConfigError: a table is dynamic.
            InputError: an id lies outside its table (on CPU; on CUDA the kernel asserts).
        """
        refuse_dynamic(self._tables, UNSHARDED)
        outputs: dict[str, JaggedTensor] = {}
        for table, names in zip(self._tables, self._names, strict=True):
            weight = self.embeddings[table.name].weight
            assert isinstance(weight, Tensor)
            for feature, name in zip(table.feature_names, names, strict=True):
                bags = features[feature]
                try:
                    rows = functional.embedding(whole_ids(bags.values()), weight).float()
                # torch's own error says neither key nor row
                except (IndexError, RuntimeError):
                    limits = {feature: table.num_embeddings}
                    check_ids(features, limits, f"the lookup of table {table.name!r}")
                    raise
                ids = bags.values() if self._need_indices else None
                outputs[name] = JaggedTensor(rows, ids, lengths=bags.lengths())
        return outputs

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self._tables

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return self._names

    def embedding_dim(self) -> int:
        """The width of all tables; -1 when there are none."""
        return self._tables[0].embedding_dim if self._tables else -1

    def need_indices(self) -> bool:
        """True if the outputs carry the ids as their weights."""
        return self._need_indices

    @property
    def device(self) -> torch.device:
        """Device on which the parameters were made."""
        return self._device

    def extra_repr(self) -> str:
        sizes = f"tables={len(self._tables)}, features={sum(map(len, self._names))}"
        return f"{sizes}, need_indices={self._need_indices}"
