"""`EmbeddingBagCollection`: pooled lookups of a KeyedJaggedTensor in whole tables, in plain torch.

The reference of every test of the sharded collections, and usable alone. Pools in float32 whatever
the storage, as the fused kernels do: the rows of a bag are summed (times their weights), and a mean
divides that sum by the bag's length. So the mean of a weighted bag is its weighted sum over its
number of ids, as in FBGEMM, not over the sum of its weights. An empty bag gives zeros.

Cost: one torch operator per feature and autograd's dense gradients (num_embeddings x embedding_dim
per table): for tables that fit a device many times over. `rayrec.distributed` shards it.

    # B rows of the batch, F features, D width of a table
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, InputError
from rayrec.layout.tables import EmbeddingBagConfig, PoolingType, refuse_dynamic
from rayrec.modules import init
from rayrec.modules.names import (
    UNSHARDED,
    check_module_names,
    get_embedding_names_by_table,
    torch_dtype,
)
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor, check_ids, check_kjt


def whole_ids(ids: Tensor) -> Tensor:
    """Ids of any width as torch's look-ups take them; fractions stay, which those refuse.

    torch makes floats of an empty list, so no ids may be of any type.
    """
    wide = ids.dtype in (torch.int32, torch.int64) or (ids.is_floating_point() and ids.numel())
    return ids if wide else ids.long()


def pool_bags(
    weight: Tensor, bags: JaggedTensor, pooling: PoolingType, per_id: Tensor | None = None
) -> Tensor:
    """Pool the rows of each bag.

    Args:
        weight: (rows, D) float32, float16 or bfloat16.
        per_id: (N,) weight of each id, or None.
    Returns:
        (B, D) float32.
    """
    ids, offsets = whole_ids(bags.values()), bags.offsets()
    # widen the rows first: torch would sum a float16 table in float16
    if weight.dtype != torch.float32:
        weight = functional.embedding(ids, weight).float()
        ids = torch.arange(ids.numel(), device=ids.device)
    # keeps the result in the graph, with zero gradients
    if not offsets.numel() - 1 or not ids.numel():
        nothing = weight[:0].sum() if per_id is None else weight[:0].sum() + per_id[:0].sum()
        return nothing + weight.new_zeros(offsets.numel() - 1, weight.shape[1])
    per_id = None if per_id is None else per_id.float()
    # always a sum; the mean of a weighted bag divides by its ids, which torch does not
    pooled = functional.embedding_bag(
        ids,
        weight,
        offsets.to(ids.dtype),
        mode="sum",
        per_sample_weights=per_id,
        include_last_offset=True,
    )
    if pooling is PoolingType.MEAN:
        pooled = pooled / bags.lengths().clamp(min=1).unsqueeze(1)
    return pooled


def expand_inverse(
    pooled: Sequence[Tensor], features: Sequence[str], kjt: KeyedJaggedTensor
) -> list[Tensor]:
    """Bring a variable batch per key back to the B rows of the full batch.

    Args:
        pooled: one (bags of the feature, D) per entry of `features`.
        kjt: the batch; returned unchanged when it has no inverse indices.
    Raises:
        InputError: the keys have different numbers of bags and there are no inverse indices, or
            they miss a feature, or one of them is of no bag.
    """
    inverse = kjt.inverse_indices_or_none()
    if inverse is None or not inverse[0]:
        strides = {tensor.shape[0] for tensor in pooled}
        if len(strides) > 1:
            raise InputError(
                f"features have {sorted(strides)} bags; a variable batch per key needs "
                "inverse_indices to make one batch of it."
            )
        return list(pooled)
    row_of = {name: row for row, name in enumerate(inverse[0])}
    missing = [feature for feature in features if feature not in row_of]
    if missing:
        raise InputError(
            f"inverse indices have no row for feature {missing[0]!r}; they name {inverse[0]}."
        )
    try:
        return [
            tensor.index_select(0, inverse[1][row_of[feature]])
            for tensor, feature in zip(pooled, features, strict=True)
        ]
    # torch's own error says neither key nor row
    except IndexError:
        check_kjt(kjt)
        raise


class EmbeddingBagCollection(nn.Module):
    """Pooled embeddings of many features, one parameter `embedding_bags.<table>.weight` per table.

    Args:
        tables: tables to look up; names are unique.
        is_weighted: True if each id counts times its weight in the batch.
        device: device of the parameters; "meta" allocates nothing. Default is torch's default
            device.
    Raises:
        ConfigError: the tables contradict themselves, an `init_fn` cannot be done for a part of a
            table, or a table is one of sequences.

    Initial values are those of `init.table_values` with seed `torch.initial_seed()`, the same as on
    any rank of a sharded model.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_module_names(tables)
        for table in tables:
            init.check_init_fn(table)
            if table.pooling is PoolingType.NONE:
                raise ConfigError(
                    f"table {table.name!r} is one of sequences, whose bags are not pooled; make it "
                    "an EmbeddingBagConfig, or put it into an EmbeddingCollection."
                )
        self._tables, self._is_weighted = list(tables), is_weighted
        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._features = [feature for table in tables for feature in table.feature_names]
        self._widths = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._device = torch.empty(0, device=device).device
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            shape = (table.num_embeddings, table.embedding_dim)
            weight = torch.empty(shape, dtype=torch_dtype(table), device=device)
            bag = nn.EmbeddingBag(*shape, mode="sum", _weight=weight, include_last_offset=True)
            self.embedding_bags[table.name] = bag
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all tables with initial values of seed `torch.initial_seed()`, but not on meta."""
        for table in self._tables:
            weight = self.embedding_bags[table.name].weight
            assert isinstance(weight, Tensor)
            init.fill(weight, torch.initial_seed(), table)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag of every feature.

        Args:
            features: a batch of B rows, with a key for every feature of the tables; more keys do no
                harm.
        Returns:
            (B, sum of D) float32: tables in order, the features of each in order.
        Raises:
            UnknownKeyError: the batch misses a feature.
            ConfigError: a table is dynamic.
            InputError: an id lies outside its table (on CPU; on CUDA the kernel asserts), or
                weights are missing.
        """
        refuse_dynamic(self._tables, UNSHARDED)
        pooled: list[Tensor] = []
        for table in self._tables:
            weight = self.embedding_bags[table.name].weight
            assert isinstance(weight, Tensor)
            for feature in table.feature_names:
                bags = features[feature]
                per_id = bags.weights() if self._is_weighted else None
                try:
                    pooled.append(pool_bags(weight, bags, table.pooling, per_id))
                # torch's own error says neither key nor row
                except (IndexError, RuntimeError, ValueError):
                    limits = {feature: table.num_embeddings}
                    check_ids(features, limits, f"the lookup of table {table.name!r}")
                    raise
        if not pooled:
            return KeyedTensor([], [], torch.empty(features.stride(), 0, device=features.device()))
        whole = torch.cat(expand_inverse(pooled, self._features, features), dim=1)
        return KeyedTensor(self._names, self._widths, whole)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Return True if ids count times their weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Device on which the parameters were made."""
        return self._device

    def extra_repr(self) -> str:
        sizes = f"tables={len(self._tables)}, features={len(self._features)}"
        return f"{sizes}, is_weighted={self._is_weighted}"
