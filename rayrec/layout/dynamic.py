"""`DynamicConfig`: a table whose ids are any 64-bit numbers, and whose rows come and go.

The rows of such a table lie in blocks. An id belongs to the block that a hash of it says, so which
rank holds it follows from row cuts between blocks, as for any other table. Inside a block rows are
given to ids when they are admitted, and taken back when a block is full. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

MOST_BLOCKS = 1024
MOST = 2**31 - 1  # steps and counts are kept in 32 bits
READ_ONLY = -1  # the lag of a feature whose ids are left alone
LATEST_S = 253_402_300_799  # the last second of the year 9999; milliseconds lie beyond it
BLOCK_ROWS = 4096  # and more: then blocks fill alike, within 2%


def time_problem(time: int) -> str:
    """Return why a time cannot be one, with the remedy."""
    return (
        f"the time {time} is not in seconds since 1970, which are 0 to {LATEST_S}; write seconds, "
        "or timestamps of Arrow, which know their unit."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthConfig:
    """Growth of a dynamic table while it trains: its rows double when most of them are in use.

    Attributes:
        max_num_embeddings: rows beyond which the table does not grow; no doubling goes over it.
        max_load_factor: share of the rows, above 0 and below 1; the table doubles where more of
            them belong to known ids.
        every_n_steps: global steps between two looks at the table, after which a window ends.
    Raises:
        ConfigError: a number is out of range.
    """

    max_num_embeddings: int
    max_load_factor: float = 0.75
    every_n_steps: int = 100

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.max_load_factor < 1:
            raise ConfigError(
                f"GrowthConfig has max_load_factor={self.max_load_factor}; it must be above 0 and "
                "below 1."
            )
        if self.every_n_steps < 1:
            raise ConfigError(
                f"GrowthConfig has every_n_steps={self.every_n_steps}; it must be at least 1."
            )

    def next_rows(self, rows: int, held: int) -> int:
        """Return the rows that a table is to have, of which so many belong to known ids."""
        return self.fitting(rows, rows + 1) if held > self.max_load_factor * rows else rows

    def fitting(self, rows: int, wanted: int) -> int:
        """Return the rows of a table after it has doubled until it has those that are wanted, or
        as often as it may.
        """
        while rows < wanted and 2 * rows <= self.max_num_embeddings:
            rows *= 2
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicConfig:
    """Rules by which ids get rows of a table and lose them.

    All of them look at the ids of the global batches alone, so which ids have a row after a step
    does not depend on the number of ranks, the plan, or the order in which ids arrive.

    Attributes:
        admission_threshold: an id gets a row in the step in which it has been seen so many times;
            until then it is looked up as zeros and counted among the candidates.
        counter_capacity: candidates that a table keeps, a multiple of its blocks; where a block has
            its share of them, those that were not seen for longest go, an eighth at once. None
            keeps as many as the table has rows, also when it grows.
        admission_probability: share of all ids that may get a row at all, chosen by a hash.
        eviction: which rows a full block takes back, an eighth of it at once: "step", those of the
            ids that were not seen for longest; "timestamp", the same by the time of the data;
            "lfu", those of the ids that were seen least often; "none", no rows, so that further ids
            get none. Rows of unknown ids go first, also under "none".
        ttl_steps: an id, or candidate, that was not seen for more steps than this is unknown again;
            None keeps it.
        ttl_s: the same in seconds of the time of the data, instead of steps.
        feature_ttl_steps: feature -> a shorter `ttl_steps` of its own. An id lives for as long as
            the longest of the features that saw it says. To that end one that such a feature sees
            counts as seen earlier, also where rows are taken back.
        feature_ttl_s: the same beside `ttl_s`.
        read_only_features: features of the table whose ids are looked up and otherwise left alone:
            they are never admitted or counted, nor kept for longer. Ids that have a row through
            other features are trained as usual; the others are zeros. It is for candidates and
            negatives, which say little about who matters.
        blocks: a power of two that divides num_embeddings; None takes the largest, up to 1,024,
            whose blocks have 4,096 rows or more.
        growth: how the table grows while it trains; None keeps num_embeddings.
    Raises:
        ConfigError: a number is out of range, or two contradict each other.
    """

    admission_threshold: int = 1
    counter_capacity: int | None = None
    admission_probability: float = 1.0
    eviction: Literal["step", "timestamp", "lfu", "none"] = "step"
    ttl_steps: int | None = None
    ttl_s: int | None = None
    feature_ttl_steps: Mapping[str, int] | None = None
    feature_ttl_s: Mapping[str, int] | None = None
    read_only_features: tuple[str, ...] = ()
    blocks: int | None = None
    growth: GrowthConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in (
            ("admission_threshold", self.admission_threshold),
            ("counter_capacity", self.counter_capacity),
            ("ttl_steps", self.ttl_steps),
            ("ttl_s", self.ttl_s),
            ("blocks", self.blocks),
        ):
            if value is not None and not 1 <= value <= MOST:
                raise ConfigError(
                    f"DynamicConfig has {name}={value}; it must be at least 1 and at most {MOST}."
                )
        if self.ttl_steps is not None and self.ttl_s is not None:
            raise ConfigError(
                f"DynamicConfig has ttl_steps={self.ttl_steps} and ttl_s={self.ttl_s}; ids grow "
                "old by one of them: leave the other out."
            )
        self._check_feature_ttls("feature_ttl_steps", "ttl_steps")
        self._check_feature_ttls("feature_ttl_s", "ttl_s")
        if self.counter_capacity is not None and self.admission_threshold == 1:
            raise ConfigError(
                f"DynamicConfig has counter_capacity={self.counter_capacity} and "
                "admission_threshold=1, with which ids get a row at once and none is counted; give "
                "a higher admission_threshold, or leave counter_capacity out."
            )
        if not 0 < self.admission_probability <= 1:
            raise ConfigError(
                f"DynamicConfig has admission_probability={self.admission_probability}; it must be "
                "above 0 and at most 1."
            )
        if self.blocks is not None and self.blocks & (self.blocks - 1):
            raise ConfigError(f"DynamicConfig has blocks={self.blocks}; it must be a power of two.")

    def _check_feature_ttls(self, name: str, of_table: str) -> None:
        most, given = getattr(self, of_table), getattr(self, name) or {}
        if given and most is None:
            raise ConfigError(
                f"DynamicConfig has {name} without {of_table}, which is for all other features and "
                "the longest of all; give it, too."
            )
        for feature, ttl in given.items():
            if not 1 <= ttl <= most:
                raise ConfigError(
                    f"DynamicConfig has {name}={ttl} for {feature!r}; it must be at least 1 and at "
                    f"most {of_table}={most}, which is the longest of all features."
                )
            if feature in self.read_only_features:
                raise ConfigError(
                    f"DynamicConfig has {feature!r} in {name} and in read_only_features, which "
                    "keep no id for longer; leave it out of one of them."
                )

    @property
    def feature_ttls(self) -> Mapping[str, int]:
        """The features that have a time to live of their own."""
        return self.feature_ttl_steps or self.feature_ttl_s or {}

    def lag(self, feature: str) -> int:
        """Return by how much sooner than its table says an id is unknown that a feature sees, in
        steps or seconds; `READ_ONLY` where the feature leaves ids alone.
        """
        if feature in self.read_only_features:
            return READ_ONLY
        ttl = self.ttl_s or self.ttl_steps or 0
        return ttl - self.feature_ttls.get(feature, ttl)

    @property
    def has_ttl(self) -> bool:
        """True if ids that were not seen for long are unknown again."""
        return self.ttl_steps is not None or self.ttl_s is not None

    @property
    def uses_time(self) -> bool:
        """True if ids come and go by the time of the data, too."""
        return self.ttl_s is not None or self.eviction == "timestamp"

    def row_bytes(self, num_embeddings: int) -> int:
        """Return the bytes of a row of a table beside its values: id, step, count, free places and
        map, 8 more for a time, and as many for each candidate that there is to a row. The map has
        64 to 128 of them, since its slots are a power of two.
        """
        size, most = self.block_rows(num_embeddings), self.block_candidates(num_embeddings)
        candidates = -(-most // size) * (30 if self.uses_time else 22) + -(-128 * most // size)
        return (158 if self.uses_time else 150) + candidates

    def check_features(self, table: str, features: Sequence[str]) -> None:
        """Check the names of features against those of the table.

        Raises:
            ConfigError: names the feature that does not look up the table.
        """
        for option, names in (
            ("read_only_features", self.read_only_features),
            ("feature_ttl_steps", self.feature_ttl_steps or ()),
            ("feature_ttl_s", self.feature_ttl_s or ()),
        ):
            for name in names:
                if name not in features:
                    raise ConfigError(
                        f"table {table!r} has {name!r} among {option}, and no feature of that "
                        f"name; name some of {list(features)}, or leave it out."
                    )

    def block_candidates(self, num_embeddings: int) -> int:
        """Return the candidates that a block of a table keeps; 0 where ids get a row at once.

        Raises:
            ConfigError: `blocks` does not divide the rows, or the blocks do not divide
                `counter_capacity`.
        """
        size = self.block_rows(num_embeddings)
        if self.admission_threshold == 1 or self.counter_capacity is None:
            return 0 if self.admission_threshold == 1 else size
        blocks = num_embeddings // size
        if self.counter_capacity % blocks:
            raise ConfigError(
                f"DynamicConfig has counter_capacity={self.counter_capacity}, which the {blocks} "
                "blocks of the table do not share alike; give a multiple of them."
            )
        return self.counter_capacity // blocks

    def block_rows(self, num_embeddings: int) -> int:
        """Return the rows of a block of a table.

        Raises:
            ConfigError: `blocks` does not divide the rows, or a block has too many.
        """
        blocks = self.blocks or 1
        if num_embeddings % blocks:
            raise ConfigError(
                f"DynamicConfig has blocks={blocks}, which does not divide "
                f"num_embeddings={num_embeddings}; give a multiple of it, or leave blocks out."
            )
        while (
            self.blocks is None
            and 2 * blocks <= MOST_BLOCKS
            and num_embeddings % (2 * blocks) == 0
            and num_embeddings // (2 * blocks) >= BLOCK_ROWS
        ):
            blocks *= 2
        rows = num_embeddings // blocks
        if rows > MOST:
            raise ConfigError(
                f"num_embeddings={num_embeddings} of a dynamic table and blocks={blocks} make "
                f"blocks of {rows} rows; one has at most {MOST}. Give more blocks, and for them a "
                f"multiple such as {-(-num_embeddings // MOST_BLOCKS) * MOST_BLOCKS}."
            )
        return rows
