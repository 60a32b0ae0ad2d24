"""`Manifest` of an artifact: the content of its folder, and the result of its check.

It is the last file written, and the only one whose presence makes a folder an artifact. Every other
file has its size and sha256 in it, and it has a sha256 of its own text, so that whoever holds the
hash of the manifest holds that of every byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rayrec.errors import ArtifactError
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.quant import PackedTable, QuantType
from rayrec.quant.packing import MAX_POWER
from rayrec.serve.compiled import Target
from rayrec.serve.files import StoredFile
from rayrec.serve.sealed import Form, SealedRecord

MANIFEST = "manifest.json"
BAGS, SEQUENCES = "bags", "sequences"


@dataclass(frozen=True, slots=True)
class StoredTable:
    """Table of the artifact: packing of its rows, and their place in a file.

    Attributes:
        name: of the table. rows, width: its size.
        type: how a row is stored.
        power: rows were multiplied by 2**power before they were packed.
        offset: byte of the file at which the first row begins.
        file: the Arrow file of the table.
        ids: the Arrow file that says whose the rows of a dynamic table are; None of other tables.
    """

    name: str
    rows: int
    width: int
    type: QuantType
    power: int
    offset: int
    file: StoredFile
    ids: StoredFile | None = None

    @property
    def packed(self) -> PackedTable:
        """The table as it lies in memory."""
        is_dynamic = self.ids is not None
        return PackedTable(
            self.name, self.rows, self.width, self.type, self.power, has_ids=is_dynamic
        )

    def files(self) -> list[StoredFile]:
        """Return its files."""
        return [self.file] if self.ids is None else [self.file, self.ids]


@dataclass(frozen=True, slots=True)
class StoredCode:
    """The dense part as machine code, and what it runs on."""

    file: StoredFile
    target: Target


@dataclass(frozen=True, slots=True)
class StoredCollection:
    """Embedding collection of the model.

    Attributes:
        name: name of the module in the model; "" is the model itself.
        kind: "bags" or "sequences".
        is_weighted: the ids of bags have weights.
        need_indices: the outputs of sequences carry ids.
        tables: name, features and pooling of its tables, in order.
    """

    name: str
    kind: str
    is_weighted: bool
    need_indices: bool
    tables: tuple[tuple[str, tuple[str, ...], str], ...]

    def configs(self, packed: Mapping[str, PackedTable]) -> list[Any]:
        """Return the configs of the tables, as the constructor of the collection takes them."""
        configs: list[EmbeddingBagConfig | EmbeddingConfig] = []
        for name, features, pooling in self.tables:
            given: dict[str, Any] = {"name": name, "feature_names": list(features)}
            given |= {"num_embeddings": packed[name].rows, "embedding_dim": packed[name].width}
            given["dynamic"] = DynamicConfig() if packed[name].has_ids else None
            if self.kind == BAGS:
                configs.append(EmbeddingBagConfig(**given, pooling=PoolingType(pooling)))
            else:
                configs.append(EmbeddingConfig(**given))
        return configs


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(SealedRecord):
    """Contents and origin of an artifact.

    Attributes:
        step: training step of the checkpoint that it was exported from.
        source: path of that checkpoint.
        outputs: name and kind ("binary", "multiclass", "regression"; "ranking" of a next-item
            model) of every output; one output of a model without tasks is called "".
        dense: the file of dense parameters. program: that of the exported dense part, or None.
        no_program: why there is no program, or "".
        compiled: the dense part as machine code; None without.
        schema: the file of the feature schema, or None.
        recipe: fields of `ModelRecipe` or `NextItemRecipe`, or None for a model of the user's code.
        parity: largest errors, measured at the export.
        collections: of the model, in its order.
        tables: in the order in which they lie in memory.
        sha256: of the text of the manifest, without this field.
    """

    FORM: ClassVar[Form] = Form(
        file=MANIFEST,
        format="rayrec.artifact",
        versions=(1, 2),  # version 1 has the dense part as torch.save writes it
        folder="artifact",
        wanted="Name a folder that rayrec export wrote.",
        other_version="Export the checkpoint with this rayrec.",
        again="Export the checkpoint again.",
    )
    step: int
    source: str
    outputs: tuple[tuple[str, str], ...]
    dense: StoredFile
    program: StoredFile | None
    no_program: str
    # left out where there is none, as in artifacts from before there were any
    compiled: StoredCode | None = None
    schema: StoredFile | None
    recipe: Mapping[str, Any] | None
    parity: Mapping[str, Any]
    collections: tuple[StoredCollection, ...]
    tables: tuple[StoredTable, ...]
    sha256: str = ""

    @property
    def version(self) -> str:
        """Name of these weights on servers: the step, and the first digits of the sha256."""
        return f"{self.step}-{self.sha256[:12]}"

    def files(self) -> list[StoredFile]:
        """Return every file but the manifest."""
        return [file for table in self.tables for file in table.files()] + self.other_files()

    def other_files(self) -> list[StoredFile]:
        """Return every file but the manifest and those of the tables."""
        compiled = None if self.compiled is None else self.compiled.file
        others = [self.dense, self.program, compiled, self.schema]
        return [one for one in others if one is not None]

    def to_bytes(self) -> bytes:
        """Return the text of manifest.json, with a line for each table."""
        body = self._sealed_body()
        tables = ",\n  ".join(json.dumps(table) for table in body.pop("tables"))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
        return ("{" + ",\n ".join([*lines, f'"tables": [\n  {tables}]']) + "}\n").encode()

    def check(self, where: str) -> None:
        """Check numbers, by which lookups read memory."""
        for table in self.tables:
            if min(table.rows, table.width) < 1 or not 0 <= table.power <= MAX_POWER:
                raise ValueError(
                    f"table {table.name!r} has {table.rows} rows of width {table.width}, power "
                    f"{table.power}"
                )
            if not 0 <= table.offset <= table.file.bytes - table.packed.num_bytes:
                raise ArtifactError(
                    f"{where}: the {table.rows} rows of table {table.name!r} do not fit "
                    f"{table.file.path}. Export the checkpoint again."
                )
