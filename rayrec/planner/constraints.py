"""Constraints of one table that a user may give the planner, in Python or as a JSON file.

    {"user": {"kinds": ["row_wise", "table_row_wise"], "pooling_factor": 12.5},
     "item": {"hosts": [0], "together": "items"}}

Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from rayrec.errors import ConfigError, PlanError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.misfit import meant
from rayrec.fields.typed import check_argument, check_fields, shown
from rayrec.layout.geometry import COLUMN_MULTIPLE
from rayrec.layout.kinds import KINDS
from rayrec.layout.plan import Storage, StorageKind
from rayrec.layout.tables import BaseEmbeddingConfig, DataType
from rayrec.layout.topology import Device, Topology
from rayrec.layout.words import also_takes

CACHE_LOAD_FACTOR = 0.2


def _from_torchrec(words: dict[str, Any]) -> dict[str, Any]:
    """`sharding_types`, `pooling_factors` and `is_weighted` as fields."""
    own = {
        "sharding_types": "kinds",
        "is_weighted": "weighted",
        "pooling_factors": "pooling_factor",
    }
    for word, ours in own.items():
        if word in words and ours in words:
            raise ConfigError(f"ParameterConstraints has {word}= and {ours}=; give one of them.")
    factors = words.pop("pooling_factors", None)
    means = {own.get(word, word): value for word, value in words.items()}
    if factors:
        check_argument("ParameterConstraints", "pooling_factors", factors, Sequence[float])
        means["pooling_factor"] = sum(factors) / len(factors)
    return means


@also_takes(_from_torchrec)
@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterConstraints:
    """Limits and facts for one table.

    TorchRec's `sharding_types=`, `pooling_factors=` and `is_weighted=` are taken as well.

    Attributes:
        kinds: the sharding kinds that may be used; None allows all.
        pooling_factor: mean ids per bag, of each feature of the table.
        min_partition: narrowest column block, in columns; None leaves it to the prices.
        weighted: the features carry a weight per id.
        skew: exponent of a Zipf law: how much more often some rows are asked for than others; 0
            means all equally often.
        ranks: the only ranks that may hold a part of it; None allows all. hosts: the same by index
            of host.
        together: name of a group of tables that lie on the same ranks, cut the same way.
        apart: name of a group of tables of which no two share a rank.
        storage: memory of its rows: "device"; "host", whose rows take none of a GPU's memory and
            are slower; "cached", in the host's memory with a cache on the GPU; "auto", on the
            device where that fits and off it else. CPU ranks have one memory.
        cache_load_factor: share of its rows that the cache holds where it has one.
    Raises:
        ConfigError: an unknown kind, or a number that makes no sense.
    """

    kinds: Sequence[str] | None = None
    pooling_factor: float = 1.0
    min_partition: int | None = None
    weighted: bool = False
    skew: float = 0.0
    ranks: Sequence[int] | None = None
    hosts: Sequence[int] | None = None
    together: str | None = None
    apart: str | None = None
    storage: StorageKind | Literal["auto"] = "device"
    cache_load_factor: float = CACHE_LOAD_FACTOR

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kinds is not None:
            check_kinds(self.kinds)
        if not 0 < self.pooling_factor < 2**63:
            raise ConfigError(
                f"pooling_factor={self.pooling_factor} must be positive, and below 2^63: the mean "
                "number of ids per bag."
            )
        if not 0 <= self.skew < float("inf"):
            raise ConfigError(
                f"skew={self.skew} must be a finite number, 0 or more: the exponent of a Zipf law "
                "of the ids."
            )
        least = self.min_partition
        if least is not None and (least < COLUMN_MULTIPLE or least % COLUMN_MULTIPLE):
            raise ConfigError(
                f"min_partition={self.min_partition} must be a positive multiple of "
                f"{COLUMN_MULTIPLE} columns."
            )
        if not 0 < self.cache_load_factor <= 1:
            raise ConfigError(
                f"cache_load_factor={self.cache_load_factor} must be a share of the rows, above 0 "
                "and up to 1."
            )
        if self.storage != "auto":
            self._stored(self.storage)
        for name in ("ranks", "hosts"):
            pinned = getattr(self, name)
            if pinned is not None and (not pinned or min(pinned) < 0):
                raise ConfigError(
                    f"{name}={pinned!r} must be a non-empty list of indices, 0 or more; leave it "
                    "out to allow all."
                )
        for name in ("together", "apart"):
            if getattr(self, name) == "":
                raise ConfigError(
                    f"{name}='' must be the name of a group of tables; leave it out for none."
                )

    def _stored(self, kind: StorageKind) -> Storage:
        return Storage(kind, self.cache_load_factor if kind == "cached" else None)

    def storages(self, device: Device) -> tuple[Storage, ...]:
        """Return the storages allowed for its rows on ranks of a `device`, the fastest first."""
        if self.storage != "auto":
            return (self._stored(self.storage),)
        return tuple(map(self._stored, get_args(StorageKind))) if device == "cuda" else (Storage(),)

    def allowed(self, topology: Topology) -> frozenset[int] | None:
        """The ranks that the pins leave, or None when nothing is pinned.

        Raises:
            ConfigError: a pin names a rank or host that the topology does not have, or the two pins
                leave no rank.
        """
        if self.ranks is None and self.hosts is None:
            return None
        for name, pinned, count in (
            ("ranks", self.ranks, topology.world_size),
            ("hosts", self.hosts, len(topology.hosts)),
        ):
            if pinned is not None and max(pinned) >= count:
                raise ConfigError(
                    f"{name}={list(pinned)} pin a table to {name[:-1]} {max(pinned)}, the topology "
                    f"has {count} {name}."
                )
        kept = set(topology.ranks if self.ranks is None else self.ranks)
        if self.hosts is not None:
            kept &= {rank for host in self.hosts for rank in topology.hosts[host]}
        if not kept:
            raise ConfigError(
                f"ranks={list(self.ranks or ())} and hosts={list(self.hosts or ())} have no rank "
                "in common."
            )
        return frozenset(kept)


NO_CONSTRAINTS = ParameterConstraints()


def storages_of(
    table: BaseEmbeddingConfig, limits: ParameterConstraints, device: Device
) -> tuple[Storage, ...]:
    """Return the storages that a table may have on ranks of a `device`, the fastest first.

    Raises:
        PlanError: its constraints name a storage that no kernel has for such a table.
    """
    storages = limits.storages(device)
    odd, bf16 = table.embedding_dim % COLUMN_MULTIPLE > 0, table.data_type is DataType.BF16
    is_dynamic = table.dynamic is not None
    if device == "cuda" and (is_dynamic or odd or bf16):  # a kernel in torch trains odd and bf16
        storages = tuple(storage for storage in storages if storage.kind == "device")
        if not storages and is_dynamic:
            raise PlanError(
                f"table {table.name!r} is dynamic and has storage={limits.storage!r}: its rows lie "
                "in a GPU's memory; leave storage out."
            )
        if not storages:
            raise PlanError(
                f"table {table.name!r} has {table.embedding_dim} columns of "
                f"{table.data_type.value} and storage={limits.storage!r}: outside of a GPU's "
                f"memory widths are multiples of {COLUMN_MULTIPLE}, of FP32 or FP16. Change it, or "
                "keep it there."
            )
    return storages


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ConfigError unless `kinds` is a non-empty sequence of names in `KINDS`."""
    if isinstance(kinds, str) or not kinds:
        raise ConfigError(f"kinds={kinds!r} must be a non-empty list of {', '.join(KINDS)}.")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"sharding kind {kind!r} is unknown{meant(kind, KINDS)}")


def check_constraints(
    constraints: Mapping[str, ParameterConstraints], tables: Collection[str]
) -> None:
    """Raise ConfigError when a constraint names a table that does not exist."""
    for name in constraints:
        if name not in tables:
            near = get_close_matches(name, list(tables), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""  # all of hundreds are no help
            raise ConfigError(
                f"constraints name table {name!r}, which is not among the {len(tables)} "
                f"tables{hint}."
            )


def constraints_from_json(
    text: str, source: str = "constraints", measured: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, ParameterConstraints]:
    """Read table name -> fields of `ParameterConstraints`.

    Args:
        measured: fields by table name that hold where the text does not give them.
    Raises:
        ConfigError: no JSON object, a field that is unknown or of another type, or a value that
            makes no sense; names the table.
    """
    read = {name: dict(values) for name, values in (measured or {}).items()}
    for name, given in json_object(text, source, ConfigError).items():
        if not isinstance(given, dict):
            raise ConfigError(f"{source}: {name} is {shown(given)}; it must be an object.")
        # null is a field that is not given, so that what was measured holds
        own = {field: value for field, value in given.items() if value is not None}
        read[name] = {**read.get(name, {}), **own}
    tables: Any = Mapping[str, ParameterConstraints]
    return dict(of_json(tables, read, source, ConfigError))
