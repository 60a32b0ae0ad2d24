"""`predict_files`: the scores of all rows of a data set, by an artifact, into a folder of files.

Every file of scores is one unit of work: some chunks of the data (row groups, record batches). The
units follow from the data alone, and every unit is scored by one thread, in batches across the
borders of its chunks and files, so the files hold the same scores for any number of workers.
Workers are processes that share the memory of the tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rayrec.checks import whole_number
from rayrec.data import FileDataset
from rayrec.data.joining import check_joins
from rayrec.data.listing import Chunk
from rayrec.data.scored import PART_ROWS, Predicted, ScoredFolder, part_name, scored_folder
from rayrec.data.scored_files import PartWriter, WholeFolder, scored_rows
from rayrec.data.statistics import check_statistics
from rayrec.errors import ConfigError
from rayrec.machine.signals import hold_signals
from rayrec.serve.artifact import Artifact, local_folder, open_artifact
from rayrec.serve.manifest import Manifest
from rayrec.serve.predictor import Predictor
from rayrec.serve.workers import WorkerPool

BATCH_ROWS = 4096
_BLOCK_ROWS = 65_536  # that are decoded together; nothing is shuffled
Unit = tuple[Path, Sequence[Chunk]]  # a file of scores, and the chunks of its rows


def predict_files(
    artifact: str | os.PathLike[str],
    data: FileDataset,
    out: str | os.PathLike[str],
    *,
    columns: Sequence[str] = (),
    workers: int = 1,
    batch_size: int = BATCH_ROWS,
    model: Callable[[], nn.Module] | None = None,
) -> Predicted:
    """Write the scores of all rows of a data set, in its order.

    Args:
        artifact: local folder that `rayrec export` wrote.
        data: the rows; neither their labels nor their weights are read. The schema may name other
            columns than that of the artifact.
        out: local folder, new or empty. It gets Parquet files, whose names sort in the order of the
            rows, with a column of scores for each task ("score" where there is one), and `columns`.
            It appears when it is complete.
        columns: columns of the data that are copied beside the scores.
        workers: processes; one works in this process. A script that starts several needs its code
            behind `if __name__ == "__main__":`.
        batch_size: rows that a worker scores at a time.
        model: builds the training module of a model of the user's code; a function of a module,
            where there are several workers.
    Raises:
        ConfigError: a number is out of range, `out` cannot be written, or the data do not fit.
        InputError: a file cannot be read, or holds what the model cannot take; names the row. Or
            a column has types that do not join in files that are read together, which is told
            before anything is scored.
        ArtifactError: there is no whole artifact of this version.
        SaveError: the storage refuses while files are written; nothing is left of them.
        TrainingFailed: a worker died.
        RunInterrupted: Ctrl-C or SIGTERM ended it; nothing is left of the files.
    """
    whole_number("workers", workers)
    whole_number("batch_size", batch_size)
    manifest = Manifest.read_file(local_folder("the artifact", artifact))
    data = data.without_labels()
    folder = scored_folder(out, data, columns, manifest.outputs)
    check_statistics(data, binary_labels=False)
    chunks = units_of(data)
    for unit in chunks:
        part = _part(data, unit)
        check_joins(part, part.order(shuffle=False, ordered=True), folder.columns.names)
    opened = open_artifact(artifact)
    job = _Score(opened, data, folder, batch_size, model)
    predictor = Predictor(opened, model)
    _check_same_features(predictor, data)
    with hold_signals() as signals, _written(folder) as hidden:
        units: list[Unit] = [
            (hidden / part_name(number, len(chunks)), unit) for number, unit in enumerate(chunks)
        ]
        count = min(workers, len(units))
        if count == 1:
            with _one_thread():
                rows = sum(job.score(predictor, unit, signals.check) for unit in units)
        else:
            with WorkerPool(job.start, count) as processes:
                rows = sum(processes.run(units, signals.check))
    assert rows == data.num_rows, "the files were counted when the data set was made"
    return Predicted(path=folder.path, rows=rows, parts=len(units))


def units_of(data: FileDataset) -> list[list[Chunk]]:
    """Return all chunks that have rows, in order, in groups that make one file of scores each.

    A group has at most `PART_ROWS` rows, or is one chunk.
    """
    units: list[list[Chunk]] = []
    rows = 0
    for chunk in data.chunks():
        if not chunk.rows:
            continue
        if not units or rows + chunk.rows > PART_ROWS:
            units.append([])
            rows = 0
        units[-1].append(chunk)
        rows += chunk.rows
    return units


@dataclass(frozen=True)
class _Score:
    """Job of a worker: scores units of the data into files."""

    artifact: Artifact
    data: FileDataset
    folder: ScoredFolder
    batch_size: int
    model: Callable[[], nn.Module] | None

    def start(self) -> Callable[[Unit], int]:
        """Make the predictor of the artifact that the starter has opened."""
        torch.set_num_threads(1)
        predictor = Predictor(self.artifact, self.model)
        return lambda unit: self.score(predictor, unit)

    def score(
        self, predictor: Predictor, unit: Unit, on_batch: Callable[[], None] = lambda: None
    ) -> int:
        """Write the scores of the rows of one unit; returns the number of rows.

        Args:
            on_batch: called before every batch is scored; its error ends the work.
        Raises:
            InputError: a file cannot be read, or holds what the model cannot take.
            SaveError: the storage refuses.
        """
        path, chunks = unit
        kept = self.folder.columns.names
        # a thread beside this one would take a core from another worker
        loader = _part(self.data, chunks).loader(
            *(0, 1, self.batch_size), shuffle=False, ordered=True, keep_columns=kept, threaded=False
        )
        writer = PartWriter(path)
        try:
            for batch in loader:
                on_batch()
                scores = predictor.predict_batch(batch)
                each = [scores] if isinstance(scores, Tensor) else list(scores.values())
                origin = batch.origin
                own = [] if origin is None or origin.columns is None else [origin.columns]
                writer.add(scored_rows(self.folder, each, own))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        return writer.rows


def _part(data: FileDataset, chunks: Sequence[Chunk]) -> FileDataset:
    """Return the rows of one unit, in blocks as they are read."""
    part = data.of_chunks(chunks)
    part.shuffle_rows = _BLOCK_ROWS
    return part


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _written(folder: ScoredFolder) -> Iterator[Path]:
    """Yield the hidden folder, which gets its name when the block ends without an error."""
    whole = WholeFolder(folder.path)
    try:
        yield whole.hidden
        whole.publish()
    except BaseException:
        whole.abandon()
        raise


def _check_same_features(predictor: Predictor, data: FileDataset) -> None:
    """Check that the data are read as the features of the model; the error names what differs."""
    trained, given = predictor.schema, data.schema
    if trained is None:
        return
    for what, wanted, own in (
        ("features", trained.feature_names(), given.feature_names()),
        ("rows of the features' tables", trained.limits(), given.limits()),
        ("number of dense columns", len(trained.dense), len(given.dense)),
        ("weights", trained.is_weighted, given.is_weighted),
    ):
        if wanted != own:
            raise ConfigError(
                f"the {what} of the artifact and of the data differ: {wanted} and {own}. Give the "
                "data the artifact's schema, but for names of columns."
            )
    held = {sequence.name for sequence in given.sequences}
    for sequence in trained.sequences:
        if sequence.name not in held:
            raise ConfigError(
                f"the model reads the sequence {sequence.name!r}, and the schema of the data has "
                f"{sorted(held)}. Give the data the artifact's schema, but for names of columns."
            )
