"""`RayDataset`: what a Ray Data pipeline makes, as a data set that ranks train on.

The pipeline runs once, when the data set is made: its blocks lie in Ray's object store (and on disk
where that is full), and are the chunks of the order of samples. From then on the order, resuming
and errors are those of files: rows are shuffled by the seed and their numbers, never by when a
block arrives. Every block is converted once beforehand, by a task of its own, which finds bad
values before training and gives the block a digest. The digests are the fingerprint: a run that
makes its pipeline again and resumes gets the same rows in the same blocks, or is told so.

Blocks are gone with the Ray cluster. A block whose node dies is made again by Ray; a pipeline that
is random without a seed then gives other rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayrec.data import FeatureSchema, RowDataset
from rayrec.data.column_types import check_columns, is_list, plain_text
from rayrec.data.convert import to_batch
from rayrec.data.listing import DataFile
from rayrec.errors import ConfigError, InputError

if TYPE_CHECKING:
    import ray
    import ray.data

PIECE_ROWS = 65_536
_CAUSE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")


class RayDataset(RowDataset):
    """The rows of a Ray Data pipeline, in an order that does not depend on the number of ranks.

    Args:
        data: the pipeline; it is materialized here, with its blocks in order.
        schema: features, labels and weights among the columns.
        num_streams: S of `order`, the largest number of ranks that read disjoint rows.
        shuffle_rows: rows per shuffled block; a rank holds one block per stream it reads.
        name: name of the data in messages.
    Raises:
        ConfigError: `data` is no Ray Data set, or a size is not positive.
        InputError: the pipeline fails, gives no rows, columns that do not fit, or a bad value.
    Cost: one run of the pipeline and one conversion of its rows, spread over the cluster; the
    object store holds all rows, of the columns that the schema names and of the others.
    """

    def __init__(
        self,
        data: ray.data.Dataset,
        schema: FeatureSchema,
        *,
        num_streams: int = 8,
        shuffle_rows: int = 8192,
        name: str = "the Ray dataset",
    ) -> None:
        self.path, self.schema = name, schema
        self.num_streams, self.shuffle_rows = num_streams, shuffle_rows
        self.files = ()
        self.order()  # checks num_streams and shuffle_rows before the pipeline runs
        refs = _blocks(data, name)
        checks = _checks(refs, schema, name)
        self.files = tuple(
            DataFile(path=f"block {number} of {name}", size=0, chunk_rows=(rows,))
            for number, (rows, _) in enumerate(checks)
        )
        self._digests = [[rows, digest] for rows, digest in checks]
        self._refs = {file.path: ref for file, ref in zip(self.files, refs, strict=True)}
        if self.num_rows == 0:
            raise InputError(f"{name} has {len(refs)} blocks and no rows. Check the pipeline.")

    def fingerprint(self) -> str:
        """Short hash of everything that the order of samples depends on.

        It covers the values of all rows as the schema reads them, their order and blocks,
        num_streams and shuffle_rows.
        """
        facts = ["Ray Data", self.num_streams, self.shuffle_rows, self._digests]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def open(self, file: DataFile) -> BlockReader:
        """Fetch one block, without a copy where it lies on this node.

        Raises:
            InputError: it is lost, and Ray cannot make it again.
        """
        import ray

        try:
            return BlockReader(plain_columns(ray.get(self._refs[file.path])))
        except ray.exceptions.RayError as error:
            raise self.broken(file.path, error) from error

    def broken(self, path: str, error: Exception) -> InputError:
        """Return the error for a block that cannot be read."""
        return InputError(
            f"cannot read {path}: {_one_line(error)}. The nodes that held it may be gone; run the "
            "pipeline again."
        )


class BlockReader:
    """A block as a file of one chunk."""

    metadata = None

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.schema: pa.Schema = table.schema
        self.chunk_rows: tuple[int, ...] = (table.num_rows,)

    def read(self, chunk: int, columns: list[str]) -> pa.Table:
        """Return the block, without a copy."""
        return self._table.select(columns)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the block in consecutive pieces."""
        yield from self._table.select(columns).to_batches(max_chunksize=PIECE_ROWS)


def plain_columns(table: pa.Table) -> pa.Table:
    """Return a block with its tensors of one dimension as lists, as Arrow stores them, and views of
    text as text.

    Ray Data makes such tensors of numpy arrays with a row of numbers for each row. Tensors of more
    dimensions stay as they are, and do not fit a schema.
    """
    for index, field in enumerate(table.schema):
        kind = field.type
        if not isinstance(kind, pa.BaseExtensionType) or not is_list(kind.storage_type):
            continue
        if len(getattr(kind, "shape", ())) == 1:
            stored = [chunk.storage for chunk in table.column(index).chunks]
            column = pa.chunked_array(stored, kind.storage_type)
            table = table.set_column(index, field.name, column)
    return plain_text(table)


def check_block(table: Any, schema: FeatureSchema, source: str) -> tuple[int, str]:
    """Convert one block as training will, and return its number of rows and a digest of them.

    Args:
        source: name of the block in messages.
    Returns:
        rows, and a digest of all values that training sees of them, in order.
    Raises:
        InputError: a column does not fit, or a value is bad.
    """
    if table.num_rows == 0:
        return 0, ""
    plain = plain_columns(table)
    check_columns(plain.schema, schema, source)
    batch = to_batch(plain, schema, source)
    ids = batch.sparse_features
    tensors = [batch.labels, batch.dense_features, ids.lengths(), ids.values()]
    tensors += [t for t in (batch.weights, ids.weights_or_none()) if t is not None]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return batch.rows, digest.hexdigest()


def _blocks(data: Any, name: str) -> list[ray.ObjectRef]:
    """Run a pipeline; its blocks as Arrow tables in the object store, in order."""
    import ray
    import ray.data

    if not isinstance(data, ray.data.Dataset):
        raise ConfigError(
            f"RayDataset takes a ray.data.Dataset, not {type(data).__name__}. Give it what "
            "ray.data.read_parquet(...) or a map of it returns."
        )
    options = data.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        refs: list[ray.ObjectRef] = data.materialize().to_arrow_refs()
    except (ray.exceptions.RayError, OSError, ValueError, pa.ArrowException) as error:
        raise InputError(f"the pipeline of {name} failed: {_one_line(error)}.") from error
    finally:
        options.preserve_order = before
    return refs


def _checks(refs: list[ray.ObjectRef], schema: FeatureSchema, name: str) -> list[tuple[int, str]]:
    """`check_block` of all blocks, by tasks beside them; the error of the first bad one."""
    import ray

    check = ray.remote(_checked)
    shared = ray.put(schema)
    tasks = [check.remote(ref, shared, f"block {i} of {name}") for i, ref in enumerate(refs)]
    try:
        answers = ray.get(tasks)
    except ray.exceptions.RayError as error:
        raise InputError(f"the blocks of {name} cannot be read: {_one_line(error)}.") from error
    for answer in answers:
        if isinstance(answer, str):
            raise InputError(answer)
    return [(int(rows), str(digest)) for rows, digest in answers]


def _checked(table: Any, schema: FeatureSchema, source: str) -> tuple[int, str] | str:
    # the message alone comes back: Ray would put the traceback of the task around an error
    try:
        return check_block(table, schema, source)
    except InputError as error:
        return str(error)


def _one_line(error: BaseException) -> str:
    """Return the first cause of an error in one line, found in the traceback that Ray includes."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if _CAUSE.match(line)]
    return (causes or lines or [type(error).__name__])[0].strip().rstrip(".")
