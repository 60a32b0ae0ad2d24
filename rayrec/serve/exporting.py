"""`export`: a checkpoint to an artifact that is served.

Tables are read from the rectangles of the checkpoint, whatever ranks and plan wrote them, twice:
once to see that every row can be packed, before anything is written, and once to pack them. Only a
chunk of a table is in memory at a time. The manifest is written last, after the artifact was
opened as a server will do it and its scores compared with those of the trained model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

from torch import nn

from rayrec.checkpoint import checkpoint_path
from rayrec.checks import whole_number
from rayrec.data import FileDataset
from rayrec.errors import ArtifactError, SaveError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_sequences import schema_of_lists
from rayrec.machine.folder_lock import folder_lock
from rayrec.modules import EmbeddingBagCollection
from rayrec.quant import QuantType, types_of
from rayrec.quant.types import Types
from rayrec.serve.artifact import COMPILED, DENSE, PROGRAM, SCHEMA, local_folder, read_artifact
from rayrec.serve.compiled import Target, check_compiler, compile_program
from rayrec.serve.dense_file import dense_bytes
from rayrec.serve.manifest import MANIFEST, Manifest, StoredCode
from rayrec.serve.parity import ParityBounds, check_bounds, compared
from rayrec.serve.predictor import Predictor
from rayrec.serve.program import GivenBags, export_program
from rayrec.serve.requests import Request
from rayrec.serve.sample import (
    ParitySample,
    SampledRows,
    check_takes_ids,
    ids_of,
    parity_sample,
    sample_scores,
)
from rayrec.serve.sealed import PARTIAL
from rayrec.serve.signing import SUFFIX, SigningKey
from rayrec.serve.stored import stored
from rayrec.serve.table_file import TABLES, measured, write_packed
from rayrec.serve.trained_model import TrainedModel, open_trained, stored_collection
from rayrec.spec.task import Task
from rayrec.storage import one_line, remove_empty

SAMPLE_ROWS = 8192
# files beside the tables that an unfinished export may leave
_FILES = (DENSE, PROGRAM, COMPILED, SCHEMA, MANIFEST + PARTIAL, MANIFEST + SUFFIX)


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    types: Types = QuantType.INT8,
    data: FileDataset | None = None,
    model: Callable[[], nn.Module] | None = None,
    schema: FeatureSchema | None = None,
    tasks: Sequence[Task] = (),
    bounds: ParityBounds | None = None,
    sample_rows: int = SAMPLE_ROWS,
    compiled: bool = False,
    signing_key: str | None = None,
) -> Manifest:
    """Write an artifact of a checkpoint, and measure the distance of its scores from the model's.

    Args:
        checkpoint: path or URI of the checkpoint.
        out: local folder, new or empty, or the remains of an unfinished export.
        types: type of all tables' packed rows, or types by table name; "*" names the rest.
        data: evaluation rows, of which a sample is scored by both; random rows when None, of which
            no AUC is known.
        model: builds the training module; None takes the recipe in the checkpoint.
        schema: schema of the columns; None takes that of the recipe, or of `data`. Without any an
            artifact takes tensors alone.
        tasks: tasks of the run, for a model of the user's code; none means one binary task.
        bounds: largest accepted distances from the trained model.
        sample_rows: number of rows that are scored by both.
        compiled: compile the dense part for this machine's processor and torch, too, which takes a
            C++ compiler and about half a minute; requests of few rows are then scored faster.
        signing_key: place of a key, by which the manifest is signed: a file, or "env:NAME".
    Returns:
        the manifest of the artifact, with the measured distances in `parity`.
    Raises:
        CheckpointError: there is no checkpoint, it is damaged, of another model, or was written
            anew meanwhile.
        ConfigError: a type, table, model or schema does not fit; or there is no compiler, or no
            key.
        InputError: a row cannot be packed, or the data cannot be read.
        ArtifactError: `out` is not empty, or another export writes to it; or scores are too far
            from the model's; names the tables; or the dense part is to be compiled and cannot be.
        SaveError: the file system refuses.
    """
    whole_number("sample_rows", sample_rows)
    folder = local_folder("out", out)
    _check_out(folder)
    key = SigningKey.read(signing_key)
    if compiled:
        check_compiler()
    if schema is None and model is not None and data is not None:
        schema = data.schema
    trained = open_trained(checkpoint_path("the checkpoint", checkpoint), model, schema, tasks)
    kinds = types_of([table.name for table in trained.tables()], types)
    reader = trained.live_rows()
    sample = parity_sample(trained, data, sample_rows, reader.keys)
    if trained.schema is None:
        check_takes_ids(trained, sample)
    packed = measured(reader, trained.tables(), kinds)
    with _owned(folder):
        (folder / TABLES).mkdir()
        wanted = ids_of(trained.tables(), sample.batch.sparse_features)
        tables, kept = write_packed(reader, folder, packed, wanted)
        manifest = _described(trained, folder, tuple(tables))
        if compiled:
            manifest = _with_compiled(folder, manifest)
        manifest = _with_parity(trained, folder, manifest, sample, kept, bounds or ParityBounds())
        trained.check_unchanged()
        manifest.write(folder, key)
    return manifest


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Have the folder of the artifact for this export alone; an error leaves nothing of it.

    Raises:
        ArtifactError: another export has it, or has written it meanwhile.
        SaveError: the file system refuses.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder) as is_alone:
            if not is_alone:
                raise ArtifactError(
                    f"another export writes to {folder} at this moment; export to another folder, "
                    "or wait for it."
                )
            _check_out(folder)
            _clear(folder)
            try:
                yield
            except BaseException:
                _clear(folder, missing)
                raise
    except OSError as error:
        # some of the folders may have been made before one was refused
        remove_empty(missing)
        raise SaveError(f"cannot write the artifact to {folder}: {one_line(error)}.") from error


def _described(trained: TrainedModel, folder: Path, tables: tuple[Any, ...]) -> Manifest:
    """Write the dense part, the program and the schema; returns a manifest without parity."""
    columns = 0 if trained.schema is None else len(trained.schema.dense)
    trouble = _write_program(trained, columns, folder / PROGRAM)
    schema = None
    if trained.schema is not None:
        schema = stored(folder, SCHEMA, schema_of_lists(trained.schema).to_json().encode())
    return Manifest(
        step=trained.restored.step,
        source=trained.path,
        tables=tables,
        collections=tuple(starmap(stored_collection, trained.collections.items())),
        outputs=trained.scorer({}).outputs,
        dense=stored(folder, DENSE, dense_bytes(trained.restored.dense)),
        program=None if trouble else stored(folder, PROGRAM),
        no_program=trouble,
        compiled=None,
        schema=schema,
        recipe=trained.recipe,
        parity={},
    )


def _write_program(trained: TrainedModel, columns: int, path: Path) -> str:
    """Write the dense part as a program; returns why it cannot be, or ""."""
    givens: dict[str, GivenBags] = {}
    for name, collection in trained.collections.items():
        if not isinstance(collection, EmbeddingBagCollection):
            return "the model has sequences, whose lengths its dense part depends on"
        givens[name] = GivenBags(collection)
    return export_program(trained.scorer(givens), givens, columns, path)


def _with_compiled(folder: Path, manifest: Manifest) -> Manifest:
    if manifest.program is None:
        raise ArtifactError(
            f"the dense part cannot be compiled, since it does not export: {manifest.no_program}. "
            "Export without compiling."
        )
    compile_program(folder / PROGRAM, folder / COMPILED)
    return replace(manifest, compiled=StoredCode(stored(folder, COMPILED), Target.here()))


def _with_parity(
    trained: TrainedModel,
    folder: Path,
    manifest: Manifest,
    sample: ParitySample,
    kept: Mapping[str, SampledRows],
    bounds: ParityBounds,
) -> Manifest:
    """Score the sample by both models; scores that are too far apart are an error."""
    read = Manifest.from_bytes(manifest.sealed().to_bytes(), str(folder))
    artifact = read_artifact(folder, read)
    build = None if trained.recipe is not None else (lambda: trained.module)
    predictor = Predictor(artifact, build)
    batch = sample.batch
    exact = sample_scores(trained, kept, sample)
    got = predictor.outputs(Request.of_batch(batch))
    told = compared(sample, manifest.outputs, exact, got)

    def of_tables() -> dict[str, float]:
        errors = {}
        for number, table in enumerate(artifact.packed.tables):
            ids = kept[table.name].ids
            values = artifact.packed.found(number, ids)
            one = {**kept, table.name: SampledRows(ids, values)}
            moved = compared(sample, manifest.outputs, exact, sample_scores(trained, one, sample))
            errors[table.name] = float(moved["max_logit_error"])
        return errors

    parity = check_bounds(told, bounds, of_tables)
    return replace(manifest, parity=parity).sealed()


def _check_out(folder: Path) -> None:
    """Check that an artifact may be written: the folder is new, empty, or an unfinished export.

    Raises:
        ArtifactError: it holds an artifact, or files that no artifact has.
    """
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; export to a new or empty folder.")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if MANIFEST in names:
        raise ArtifactError(
            f"{folder} already holds a complete artifact or checkpoint; export to a new folder, or "
            "delete it first."
        )
    foreign = sorted(names - {TABLES, *_FILES})
    if foreign:
        raise ArtifactError(
            f"{folder} holds {foreign[0]!r}, which is no part of an artifact; export to a new or "
            "empty folder."
        )


def _clear(folder: Path, made: Sequence[Path] = ()) -> None:
    """Remove the files and folders of an unfinished export."""
    for name in _FILES:
        with suppress(OSError):  # a storage that has refused a write may refuse this, too
            (folder / name).unlink()
    shutil.rmtree(folder / TABLES, ignore_errors=True)
    remove_empty(made)
