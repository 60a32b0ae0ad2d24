"""`Manifest` of an artifact: the content of its folder, and the result of its check.

It is the last file written, and the only one whose presence makes a folder an artifact. Every other
file has its size and sha256 in it, and it has a sha256 of its own text, so that whoever holds the
hash of the manifest holds that of every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from rayrec.errors import ArtifactError
from rayrec.layout.tables import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.quant import PackedTable, QuantType
from rayrec.quant.packing import MAX_POWER
from rayrec.serve.compiled import Target

MANIFEST = "manifest.json"
FORMAT, VERSION = "rayrec.artifact", 2
_READ = (1, VERSION)  # version 1 has the dense part as torch.save writes it
BAGS, SEQUENCES = "bags", "sequences"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the artifact: path in its folder, size in bytes, sha256 of its bytes."""

    path: str
    bytes: int
    sha256: str

    def check(self, where: str, folder: str) -> None:
        """Check path and size of a file that the document at `where` names.

        Raises:
            ValueError, TypeError, AttributeError: path or size is invalid.
            ArtifactError: the file lies outside of the folder.
        """
        if type(self.bytes) is not int or self.bytes < 0:
            raise ValueError(f"file {self.path!r} has {self.bytes!r} bytes")
        if b"\0" in self.path.encode():
            raise ValueError(f"file {self.path!r} has a null character")
        if self.path.startswith("/") or ".." in PurePosixPath(self.path).parts:
            raise ArtifactError(
                f"{where} names file {self.path!r}, which lies outside of the {folder}. Copy it "
                "again from where it was written."
            )


@dataclass(frozen=True, slots=True)
class StoredTable:
    """Table of the artifact: packing of its rows, and their place in a file.

    Attributes:
        packed: name, size, type and power.
        offset: byte of the file at which the first row begins.
        file: the Arrow file of the table.
    """

    packed: PackedTable
    offset: int
    file: StoredFile


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

    def configs(
        self, packed: Mapping[str, PackedTable]
    ) -> list[EmbeddingBagConfig] | list[EmbeddingConfig]:
        """Return the configs of the tables, as the constructor of the collection takes them."""
        bags, sequences = [], []
        for name, features, pooling in self.tables:
            given: dict[str, Any] = {"name": name, "feature_names": list(features)}
            given |= {"num_embeddings": packed[name].rows, "embedding_dim": packed[name].width}
            if self.kind == BAGS:
                bags.append(EmbeddingBagConfig(**given, pooling=PoolingType(pooling)))
            else:
                sequences.append(EmbeddingConfig(**given))
        return bags if self.kind == BAGS else sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents and origin of an artifact.

    Attributes:
        step: training step of the checkpoint that it was exported from.
        source: path of that checkpoint.
        tables: tables in the order in which they lie in memory.
        collections: collections of the model, in its order.
        outputs: name and kind ("binary", "multiclass", "regression") of every output; one output of
            a model without tasks is called "".
        dense: file of dense parameters. program: file of the exported dense part, or None.
        no_program: reason why there is no program, or "".
        compiled: file of the dense part as machine code, and its target, or None.
        schema: file of the feature schema, or None.
        recipe: JSON data of the `ModelRecipe`, or None for a model of the user's code.
        parity: largest errors, measured at the export.
        sha256: hash of the text of the manifest, without this field.
    """

    step: int
    source: str
    tables: tuple[StoredTable, ...]
    collections: tuple[StoredCollection, ...]
    outputs: tuple[tuple[str, str], ...]
    dense: StoredFile
    program: StoredFile | None
    no_program: str
    compiled: tuple[StoredFile, Target] | None
    schema: StoredFile | None
    recipe: Mapping[str, Any] | None
    parity: Mapping[str, Any]
    sha256: str = ""

    def files(self) -> list[StoredFile]:
        """Return every file but the manifest."""
        return [table.file for table in self.tables] + self.other_files()

    def other_files(self) -> list[StoredFile]:
        """Return every file but the manifest and those of the tables."""
        compiled = None if self.compiled is None else self.compiled[0]
        others = [self.dense, self.program, compiled, self.schema]
        return [one for one in others if one is not None]

    def sealed(self) -> Manifest:
        """Return the same manifest with its sha256."""
        return replace(self, sha256=fingerprint(self._body()))

    def to_bytes(self) -> bytes:
        """Return the text of manifest.json."""
        body = self._body() | {"sha256": self.sha256 or fingerprint(self._body())}
        tables = ",\n  ".join(json.dumps(table) for table in body.pop("tables"))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
        return ("{" + ",\n ".join([*lines, f'"tables": [\n  {tables}]']) + "}\n").encode()

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        body |= {"step": self.step, "source": self.source}
        body["outputs"] = [list(output) for output in self.outputs]
        body["dense"] = asdict(self.dense)
        body["program"] = None if self.program is None else asdict(self.program)
        body["no_program"] = self.no_program
        # left out where there is none, as in artifacts from before there were any
        if self.compiled is not None:
            file, target = self.compiled
            body["compiled"] = {"file": asdict(file), "target": asdict(target)}
        body["schema"] = None if self.schema is None else asdict(self.schema)
        body |= {"recipe": self.recipe, "parity": dict(self.parity)}
        body["collections"] = [asdict(one) for one in self.collections]
        body["tables"] = [_table_json(table) for table in self.tables]
        # in the form that is read back: JSON makes lists of tuples
        whole: dict[str, Any] = json.loads(json.dumps(body))
        return whole

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Parse manifest.json.

        Raises:
            ArtifactError: it is no manifest, of another version, or damaged.
        """
        again = "Export the checkpoint again."
        try:
            body = json.loads(text)
            if body.get("format") != FORMAT:
                raise ArtifactError(
                    f"{where}/{MANIFEST} is no {FORMAT} manifest but says "
                    f"format={body.get('format')!r}. Name a folder that rayrec export wrote."
                )
            version = body["version"]
            if version not in _READ:
                raise ArtifactError(
                    f"{where} has artifact version {version}; this rayrec reads versions 1 to "
                    f"{VERSION}. Export the checkpoint with this rayrec."
                )
            sha256 = body.pop("sha256")
            if sha256 != fingerprint(body):
                raise ArtifactError(
                    f"{where}/{MANIFEST} is damaged: its sha256 is not the one that it says. "
                    f"{again}"
                )
            manifest = cls(
                **{key: body[key] for key in ("step", "source", "no_program", "recipe", "parity")},
                tables=tuple(_table_from_json(entry) for entry in body["tables"]),
                collections=tuple(_collection_from_json(one) for one in body["collections"]),
                outputs=tuple((name, kind) for name, kind in body["outputs"]),
                dense=StoredFile(**body["dense"]),
                program=None if body["program"] is None else StoredFile(**body["program"]),
                compiled=_compiled_from_json(body.get("compiled")),
                schema=None if body["schema"] is None else StoredFile(**body["schema"]),
                sha256=sha256,
            )
            manifest._check_places(where)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{where}/{MANIFEST} cannot be read: {error!r}. {again}") from error
        return manifest

    def _check_places(self, where: str) -> None:
        for file in self.files():
            file.check(f"{where}/{MANIFEST}", "artifact")
        for table in self.tables:
            packed = table.packed
            sizes = packed.rows, packed.width
            # lookups read memory by these numbers
            whole = all(type(number) is int for number in (*sizes, packed.power, table.offset))
            if not whole or min(sizes) < 1 or not 0 <= packed.power <= MAX_POWER:
                raise ValueError(
                    f"table {packed.name!r} has {packed.rows!r} rows of width {packed.width!r}, "
                    f"power {packed.power!r}, at byte {table.offset!r}"
                )
            if not 0 <= table.offset <= table.file.bytes - table.packed.num_bytes:
                raise ArtifactError(
                    f"{where}: the {table.packed.rows} rows of table {table.packed.name!r} do not "
                    f"fit {table.file.path}. Export the checkpoint again."
                )


def fingerprint(body: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON data, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _table_json(table: StoredTable) -> dict[str, Any]:
    packed = table.packed
    return {
        "name": packed.name,
        "rows": packed.rows,
        "width": packed.width,
        "type": packed.kind.name.lower(),
        "power": packed.power,
        "offset": table.offset,
        "file": asdict(table.file),
    }


def _table_from_json(entry: Mapping[str, Any]) -> StoredTable:
    kind = QuantType.named(entry["type"])
    packed = PackedTable(entry["name"], entry["rows"], entry["width"], kind, entry["power"])
    return StoredTable(packed, entry["offset"], StoredFile(**entry["file"]))


def _compiled_from_json(entry: Mapping[str, Any] | None) -> tuple[StoredFile, Target] | None:
    if entry is None:
        return None
    told = entry["target"]
    target = Target(torch=told["torch"], processor=tuple(told["processor"]))
    return StoredFile(**entry["file"]), target


def _collection_from_json(entry: Mapping[str, Any]) -> StoredCollection:
    tables: Sequence[Any] = entry["tables"]
    return StoredCollection(
        name=entry["name"],
        kind=entry["kind"],
        is_weighted=entry["is_weighted"],
        need_indices=entry["need_indices"],
        tables=tuple((name, tuple(features), pooling) for name, features, pooling in tables),
    )
