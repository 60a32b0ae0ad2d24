"""The sharding kinds that have a name in TorchRec, each a value of the one geometry.

Where a table has fewer rows (or fewer groups of four columns) than there are ranks, fewer blocks
are made and the first ranks of the list own them. `kind_of` names a layout for people; nothing in
the runtime asks for it. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from operator import index

from rayrec.errors import PlanError
from rayrec.fields.typed import shown
from rayrec.layout.geometry import COLUMN_MULTIPLE, Layout, Replicated, TableLayout, even_cuts
from rayrec.layout.tables import BaseEmbeddingConfig

# Where a larger share of a row block's bags have ids, all bags travel.
COMPACT_BELOW = 0.6
# Columns of float32 in a cache line: for narrower blocks, an index per bag is not worth it.
COMPACT_COLUMNS = 16


class ShardingType(Enum):
    """The kinds as TorchRec's enumeration; a list of kinds takes the values."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    COLUMN_WISE = "column_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


KINDS = tuple(kind.value for kind in ShardingType)


def table_wise(table: BaseEmbeddingConfig, rank: int) -> TableLayout:
    """The whole table on one rank."""
    owner = tuple(_ranks("table_wise", [rank]))
    return TableLayout((0, table.num_embeddings), (0, table.embedding_dim), (owner,))


def row_wise(table: BaseEmbeddingConfig, ranks: Sequence[int]) -> TableLayout:
    """Rows cut evenly over `ranks`."""
    ranks = _ranks("row_wise", ranks)
    cuts = even_cuts(table.num_embeddings, len(ranks), table.row_multiple)
    return TableLayout(cuts, (0, table.embedding_dim), tuple((r,) for r in ranks[: len(cuts) - 1]))


def column_wise(table: BaseEmbeddingConfig, ranks: Sequence[int]) -> TableLayout:
    """Columns cut evenly over `ranks`."""
    ranks = _ranks("column_wise", ranks)
    cuts = even_cuts(table.embedding_dim, len(ranks), COLUMN_MULTIPLE)
    return TableLayout((0, table.num_embeddings), cuts, (tuple(ranks[: len(cuts) - 1]),))


def table_row_wise(table: BaseEmbeddingConfig, host: Sequence[int]) -> TableLayout:
    """Rows cut evenly over the ranks of one host."""
    return row_wise(table, host)


def table_column_wise(table: BaseEmbeddingConfig, host: Sequence[int]) -> TableLayout:
    """Columns cut evenly over the ranks of one host."""
    return column_wise(table, host)


def grid_shard(table: BaseEmbeddingConfig, hosts: Sequence[Sequence[int]]) -> TableLayout:
    """Column block j lives on host j and is split by rows over that host's ranks.

    Raises:
        PlanError: hosts are no ranks by host, or have different numbers of them, so that no common
            row cuts exist.
    """
    try:
        hosts = [_ranks("grid_shard", host) for host in hosts]
    except TypeError:
        raise PlanError(
            f"grid_shard was given {shown(hosts)}; it takes the ranks of each host, such as "
            "[range(2), range(2, 4)]."
        ) from None
    if len({len(host) for host in hosts}) != 1:
        raise PlanError(
            f"grid_shard needs hosts with equally many ranks, got {[len(host) for host in hosts]}."
        )
    rows = even_cuts(table.num_embeddings, len(hosts[0]), table.row_multiple)
    cols = even_cuts(table.embedding_dim, len(hosts), COLUMN_MULTIPLE)
    # Column block j lies on host j; transposed, owners are row block by row block.
    by_column = [hosts[j][: len(rows) - 1] for j in range(len(cols) - 1)]
    return TableLayout(rows, cols, tuple(zip(*by_column, strict=True)))


def data_parallel(table: BaseEmbeddingConfig, ranks: Sequence[int]) -> Replicated:
    """A copy of the table on every rank."""
    owners = tuple(_ranks("data_parallel", ranks))
    return Replicated(table.num_embeddings, table.embedding_dim, owners)


def _ranks(kind: str, ranks: Iterable[int]) -> Sequence[int]:
    """The numbers of ranks; PlanError where they are something else."""
    if isinstance(ranks, range):
        return ranks  # of thousands of ranks, for each candidate of a plan
    try:
        return [index(rank) for rank in ranks]
    except TypeError:
        raise PlanError(
            f"{kind} was given {shown(ranks)}; it takes the numbers of ranks, such as range(2)."
        ) from None


def kind_of(layout: Layout, hosts: Sequence[Sequence[int]]) -> str:
    """Name of a layout for reports: one of `KINDS`, or "product_grid" where it has none of these.

    Args:
        hosts: ranks by host, which tells row_wise from table_row_wise; pass one host with all ranks
            when unknown.
    """
    if isinstance(layout, Replicated):
        return "data_parallel"
    one_row, one_col = layout.num_row_blocks == 1, layout.num_col_blocks == 1
    if one_row and one_col:
        return "table_wise"
    # With a single host every layout lies on one host, so the plainer name is used.
    on_one_host = len(hosts) > 1 and any(set(layout.ranks) <= set(host) for host in hosts)
    if one_col:
        return "table_row_wise" if on_one_host else "row_wise"
    if one_row:
        return "table_column_wise" if on_one_host else "column_wise"
    # A grid_shard has each column block on one host, and no two on the same.
    host_of = {rank: i for i, host in enumerate(hosts) for rank in host}
    columns = [
        {host_of.get(rank) for rank in column} for column in zip(*layout.owners, strict=True)
    ]
    on_hosts = set().union(*columns)
    per_host = all(len(column) == 1 for column in columns) and len(on_hosts) == len(columns)
    return "grid_shard" if per_host else "product_grid"


def takes_two_hops(layout: Layout, hosts: Sequence[Sequence[int]]) -> bool:
    """Return True if a layout's rows are summed inside hosts before they cross to others.

    They are where row blocks fill hosts, with one block of every column block per rank. That sends
    1 / (ranks per host) of the bytes between hosts. table_row_wise, grid_shard and row_wise over
    all ranks are such layouts, where hosts have equally many ranks and there is more than one of
    either.
    """
    if isinstance(layout, Replicated) or len(hosts) < 2:
        return False
    # A host of one rank has nothing to sum. The second hop pairs ranks of equal index in their
    # hosts, so hosts must have equally many.
    if len(hosts[0]) < 2 or len({len(host) for host in hosts}) != 1:
        return False
    # A host sums what it holds of a bag, so it must hold all row blocks or none, one on each rank.
    for column in zip(*layout.owners, strict=True):
        counts = Counter(column)
        filled = [host for host in hosts if any(rank in counts for rank in host)]
        if any(counts[rank] != 1 for host in filled for rank in host):
            return False
    return True
