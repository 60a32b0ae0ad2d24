"""The only description of a table in rayrec: `EmbeddingBagConfig` and `EmbeddingConfig`.

Everything else (plan, shard, checkpoint, schema) refers to a table by its name. The classes and
their fields carry TorchRec's names. Standard library only, so that a plan can be made on a machine
without torch; `rayrec.modules` re-exports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from typing import Any, Self

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.layout.dynamic import DynamicConfig

UNBOUNDED = 2**64 - 1  # -1 without a sign, the one number that is no id of a dynamic table
MAX_FLOAT32 = 3.4028234663852886e38
MAX_ELEMENTS = 2**60  # bytes and optimizer state of more would overflow 64 bits

# Options of TorchRec's tables for what does not exist here, and what to do instead.
_NOT_HERE = {
    "input_dim": "give dynamic=DynamicConfig() for ids of any size",
    "num_embeddings_post_pruning": "serve the whole table, packed by rayrec.quant",
    "total_num_buckets": "rows are cut by a plan, and every plan can be restored as any other",
    "use_virtual_table": "give num_embeddings and dynamic=DynamicConfig()",
    "virtual_table_eviction_policy": "DynamicConfig has the rules by which rows are evicted",
    "enable_embedding_update": "copy rows in with rayrec.distributed.load_table",
    "stash_weights": "rows of Storage('host') or 'cached' lie outside of the GPU",
}


class DataType(Enum):
    """Storage type of a table's rows."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"

    @property
    def torch_name(self) -> str:
        """The name of torch's dtype."""
        return {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[self.value]

    @property
    def num_bytes(self) -> int:
        """Bytes per element."""
        return int(self.name[-2:]) // 8

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return {"FP32": MAX_FLOAT32, "FP16": 65504.0, "BF16": 3.3895313892515355e38}[self.value]


class PoolingType(Enum):
    """Pooling of the rows of a bag into one row: their sum, their mean, or (NONE) none at all."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@dataclass
class BaseEmbeddingConfig:
    """One embedding table: its size, the features that look it up, and its initial values.

    Attributes:
        num_embeddings: rows; ids of its features lie in [0, num_embeddings).
        embedding_dim: columns; multiples of 4 have the faster kernels on GPUs.
        name: unique within a model.
        data_type: storage of the rows.
        feature_names: the features looked up in this table, in output order; a feature may serve
            several tables.
        weight_init_min, weight_init_max: bounds of the uniform initial values; default is -+ sqrt(1
            / num_embeddings).
        init_fn: fills a (num_embeddings, embedding_dim) tensor in place, instead; see
            `rayrec.modules.init_fn` for what it may do.
        dynamic: ids are any 64-bit numbers but -1, which get rows and lose them by these rules;
            num_embeddings is how many have one at a time. See docs/dynamic.md.
        need_pos: taken as TorchRec's and without effect: weights of places work under every plan.
        input_dim and what follows: TorchRec's options of what does not exist here.
    Raises:
        ConfigError: a size is not positive or beyond what 64 bits address, a bound is no finite
            number of the data type or above the other, a feature is named twice, initial values are
            said twice, or an option is given that does not exist here.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    dynamic: DynamicConfig | None = field(default=None, kw_only=True)
    need_pos: InitVar[bool] = field(default=False, kw_only=True)
    input_dim: InitVar[Any] = field(default=None, kw_only=True)
    num_embeddings_post_pruning: InitVar[Any] = field(default=None, kw_only=True)
    total_num_buckets: InitVar[Any] = field(default=None, kw_only=True)
    use_virtual_table: InitVar[Any] = field(default=False, kw_only=True)
    virtual_table_eviction_policy: InitVar[Any] = field(default=None, kw_only=True)
    enable_embedding_update: InitVar[Any] = field(default=False, kw_only=True)
    stash_weights: InitVar[Any] = field(default=False, kw_only=True)

    def __post_init__(self, need_pos: bool, *not_here: Any) -> None:
        check_fields(self)
        for (option, instead), value in zip(_NOT_HERE.items(), not_here, strict=True):
            if value is not None and value is not False:
                raise ConfigError(
                    f"table {self.name!r} has {option}={value!r}, which exists in TorchRec alone; "
                    f"leave it out: {instead}."
                )
        if self.num_embeddings < 1:
            raise ConfigError(
                f"table {self.name!r} has num_embeddings={self.num_embeddings}; it needs at least "
                "one row."
            )
        if self.embedding_dim < 1:
            raise ConfigError(
                f"table {self.name!r} has embedding_dim={self.embedding_dim}; it needs at least "
                "one column."
            )
        if len(set(self.feature_names)) != len(self.feature_names):
            twice = sorted({f for f in self.feature_names if self.feature_names.count(f) > 1})
            raise ConfigError(
                f"table {self.name!r} names feature {twice[0]!r} twice in feature_names."
            )
        if self.num_embeddings * self.embedding_dim > MAX_ELEMENTS:
            raise ConfigError(
                f"table {self.name!r} has {self.num_embeddings} x {self.embedding_dim} elements; a "
                f"table holds at most {MAX_ELEMENTS}."
            )
        # A bound that is not given has its default here, so one given bound may contradict a
        # default.
        low, high = self.init_bounds()
        bounded = self.weight_init_min is not None or self.weight_init_max is not None
        if self.init_fn is not None and bounded:
            raise ConfigError(
                f"table {self.name!r} has both init_fn and weight_init_min or weight_init_max; "
                "give one of the two."
            )
        if self.dynamic is not None:
            try:
                self.dynamic.block_candidates(self.num_embeddings)
            except ConfigError as error:
                raise ConfigError(f"table {self.name!r}: {error}") from None
            if self.dynamic.growth is not None:
                most = self.dynamic.growth.max_num_embeddings
                if most < self.num_embeddings:
                    raise ConfigError(
                        f"table {self.name!r} has num_embeddings={self.num_embeddings} and "
                        f"max_num_embeddings={most}, to which it cannot grow; give a multiple of "
                        "num_embeddings by a power of two."
                    )
            if self.init_fn is not None:
                raise ConfigError(
                    f"table {self.name!r} has init_fn and dynamic: rows of a dynamic table begin "
                    "when their ids come; give weight_init_min and weight_init_max instead."
                )
        if low > high:
            raise ConfigError(
                f"table {self.name!r} has weight_init_min={low} above weight_init_max={high}."
            )
        largest = self.data_type.largest
        # a nan fails these comparisons, too
        if not (-largest <= low <= high <= largest and high - low <= largest):
            raise ConfigError(
                f"table {self.name!r} has weight_init_min={low} and weight_init_max={high}; in "
                f"{self.data_type.value} they may be {largest:.4g} from 0 and from each other."
            )

    def init_bounds(self) -> tuple[float, float]:
        """Bounds (low, high) of the uniform distribution of initial values."""
        return self.get_weight_init_min(), self.get_weight_init_max()

    def get_weight_init_min(self) -> float:
        """The lower of `init_bounds`."""
        # TorchRec has the same default, so models start with rows of the same size.
        default = -(self.num_embeddings**-0.5)
        return default if self.weight_init_min is None else self.weight_init_min

    def get_weight_init_max(self) -> float:
        """The upper of `init_bounds`."""
        default = self.num_embeddings**-0.5
        return default if self.weight_init_max is None else self.weight_init_max

    @property
    def row_multiple(self) -> int:
        """Rows between which the table may be cut: those of a block of a dynamic table, else 1."""
        return 1 if self.dynamic is None else self.dynamic.block_rows(self.num_embeddings)

    @property
    def most_rows(self) -> int:
        """Rows that the table has after it has grown as far as it may; else `num_embeddings`."""
        growth = None if self.dynamic is None else self.dynamic.growth
        rows = self.num_embeddings
        return rows if growth is None else growth.fitting(rows, growth.max_num_embeddings)

    def with_rows(self, rows: int) -> Self:
        """Return the dynamic table with other rows, in as many blocks, with the first values of
        this one.
        """
        assert self.dynamic is not None, "the table is dynamic"
        low, high = self.init_bounds()
        return replace(
            self,
            num_embeddings=rows,
            weight_init_min=low,
            weight_init_max=high,
            dynamic=replace(self.dynamic, blocks=self.num_embeddings // self.row_multiple),
        )

    def fitting(self, rows: int) -> Self:
        """Return the table after it has grown to so many rows, or as far as it may."""
        if self.dynamic is None or self.dynamic.growth is None:
            return self
        fitting = self.dynamic.growth.fitting(self.num_embeddings, rows)
        return self if fitting == self.num_embeddings else self.with_rows(fitting)

    @property
    def id_limit(self) -> int:
        """The least number, as 64 bits without a sign, that is no id of the table."""
        return self.num_embeddings if self.dynamic is None else UNBOUNDED

    def num_features(self) -> int:
        """Features that look up this table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose bags are pooled to one row each."""

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self, *torchrecs: Any) -> None:
        super().__post_init__(*torchrecs)
        if self.pooling is PoolingType.NONE:
            raise ConfigError(
                f"table {self.name!r} has pooling NONE in an EmbeddingBagConfig; use "
                "EmbeddingConfig for sequences."
            )


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one per id (a sequence), not pooled."""

    pooling: PoolingType = field(default=PoolingType.NONE, init=False)


def refuse_dynamic(tables: Iterable[BaseEmbeddingConfig], why: str) -> None:
    """Raise ConfigError for the first dynamic table.

    Args:
        why: what does not go with it, and what to do instead.
    """
    for table in tables:
        if table.dynamic is not None:
            raise ConfigError(f"table {table.name!r} is dynamic, and {why}.")


def refuse_growth(tables: Iterable[BaseEmbeddingConfig], why: str) -> None:
    """Raise ConfigError for the first table that grows; `why` as for `refuse_dynamic`."""
    for table in tables:
        if table.dynamic is not None and table.dynamic.growth is not None:
            raise ConfigError(f"table {table.name!r} has growth, and {why}.")


def check_tables(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Check that names are present and unique, that every table has a feature, and that a dynamic
    one has those that it names as read only.

    Raises:
        ConfigError: names the table and the contradiction.
    """
    seen: set[str] = set()
    for table in tables:
        if not table.name:
            raise ConfigError(
                f"a table of {table.num_embeddings} x {table.embedding_dim} has no name; give it "
                "name='...'."
            )
        if table.name in seen:
            raise ConfigError(
                f"table {table.name!r} is named twice; names must be unique within a model."
            )
        if not table.feature_names:
            raise ConfigError(
                f"table {table.name!r} has no feature_names; name at least one feature that looks "
                "it up."
            )
        if table.dynamic is not None:
            table.dynamic.check_features(table.name, table.feature_names)
        seen.add(table.name)
