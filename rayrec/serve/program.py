"""Dense part of a model as a `torch.export` program, which needs no code of the model's.

The collections are left out: their pooled rows are inputs, so that the tables stay in their files.

    # B rows of the batch, I dense columns, C columns of all features of a collection
"""

from __future__ import annotations

import io
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from rayrec.errors import ArtifactError
from rayrec.modules import EmbeddingBagCollection, get_embedding_names_by_table
from rayrec.serve.scorer import Scorer
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor
from rayrec.storage import one_line

MAX_ROWS = 1 << 20
MODEL = "scorer.model."  # begins the names of the model's tensors in a program
_TROUBLE = (RuntimeError, ValueError, KeyError, TypeError, OSError)
Program = Callable[..., tuple[Tensor, ...]]


class GivenBags(nn.Module):
    """Stand-in for a pooled collection, which returns rows that were looked up before.

    Args:
        collection: collection that it replaces.
    """

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        tables = collection.embedding_bag_configs()
        names = get_embedding_names_by_table(tables)
        self._names = [name for own in names for name in own]
        self._widths = [table.embedding_dim for table in tables for _ in table.feature_names]
        # in a list, since an exported module may not set its attributes
        self.given: list[Tensor] = []

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the rows in `given`."""
        return KeyedTensor(self._names, self._widths, self.given[0])

    @property
    def width(self) -> int:
        """Number of columns of all keys together, C."""
        return sum(self._widths)


class _DensePart(nn.Module):
    """(B, I), then (B, C) of every collection -> the outputs of the scorer."""

    def __init__(self, scorer: Scorer, givens: list[GivenBags]) -> None:
        super().__init__()
        self.scorer, self._givens = scorer, givens

    def forward(self, dense: Tensor, *pooled: Tensor) -> tuple[Tensor, ...]:
        nothing = KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0).int(), stride=0)
        try:
            for given, rows in zip(self._givens, pooled, strict=True):
                given.given.append(rows)
            outputs: tuple[Tensor, ...] = self.scorer(dense, nothing)
        finally:
            for given in self._givens:
                given.given.clear()
        return outputs


def export_program(
    scorer: Scorer, givens: Mapping[str, GivenBags], dense_columns: int, path: Path
) -> str:
    """Export the dense part of a model and save it.

    Args:
        scorer: scorer of the model, with `givens` in the places of its collections.
        dense_columns: number of dense columns, I.
    Returns:
        "" when the program was written, else why the model does not export, in one line.
    Raises:
        OSError: the file system refuses.
    """
    part = _DensePart(scorer, list(givens.values())).eval()
    rows = 4
    widths = [given.width for given in givens.values()]
    written = io.BytesIO()
    inputs = (torch.randn(rows, dense_columns), *(torch.randn(rows, width) for width in widths))
    try:
        with torch.no_grad(), dropped_sources():
            # once outside, so that what layers keep for later calls is made of real tensors
            wanted = part(*inputs)
            batch = torch.export.Dim("B", min=1, max=MAX_ROWS)
            shapes = ({0: batch}, tuple({0: batch} for _ in widths))
            program = torch.export.export(part, inputs, dynamic_shapes=shapes)
            got = program.module()(*inputs)
            if not all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(got, wanted, strict=True)):
                return "the exported program gives other results than the model"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # not into the file: on a full disk torch's writer ends the process
                torch.export.save(program, written)
            drop_symbols(program)
    # whatever a model of the user's holds may refuse to be traced, and it is served all the same
    except Exception as error:
        return f"{type(error).__name__}: {one_line(error)}"[:300]
    path.write_bytes(written.getbuffer())
    return ""


def load_program(content: bytes, where: Path) -> Program:
    """Load an exported dense part.

    Args:
        content: bytes of the file that `export_program` wrote.
        where: path of the file, for messages.

    Raises:
        ArtifactError: this torch cannot load it.
    """
    try:
        return cast("Program", torch.export.load(io.BytesIO(content)).module())
    except _TROUBLE as error:
        raise _not_loaded(where, error) from error


def program_with(content: bytes, dense: Mapping[str, Tensor], where: Path) -> bytes:
    """Return the bytes of an exported dense part with other parameters.

    Args:
        content: bytes of the file that `export_program` wrote.
        dense: parameters and buffers by their names in the model; those that the program does not
            use are not read.
        where: path of the file, for messages.
    Raises:
        ArtifactError: this torch cannot load it.
    """
    try:
        program = torch.export.load(io.BytesIO(content))
        with torch.no_grad():
            for name, tensor in program.state_dict.items():
                tensor.copy_(dense[name.removeprefix(MODEL)])
        written = io.BytesIO()
        torch.export.save(program, written)
    except _TROUBLE as error:
        raise _not_loaded(where, error) from error
    return written.getvalue()


def _not_loaded(where: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{where} cannot be loaded by torch {torch.__version__}: {one_line(error)}. Export the "
        "checkpoint with this torch."
    )


@contextmanager
def dropped_sources() -> Iterator[None]:
    """Drop the sources of all graphs that are made inside the block."""
    loader = getattr(torch.fx.graph_module, "_loader", None)
    sources: dict[str, str] = getattr(loader, "eval_cache", {})
    before = set(sources)
    try:
        yield
    finally:
        for name in set(sources) - before:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


def drop_symbols(program: torch.export.ExportedProgram) -> None:
    """Drop what torch keeps of an exported program, which is not traced any more.

    The sizes of a traced tensor are symbols, which C++ holds where no garbage collection sees them,
    so the table of all symbols of an export lives for ever, and so do the sources of its graphs.
    That is some 0.2 MB of a small model, and a run that publishes exports a model with every base.
    None of this is torch's interface: where another torch keeps it elsewhere, nothing is dropped.
    """
    with suppress(AttributeError, ImportError):
        from torch._subclasses.fake_tensor import FakeTensorMode

        values = [node.meta.get("val") for node in program.graph.nodes]
        modes = [value.fake_mode for value in values if hasattr(value, "fake_mode")]
        for symbols in {id(mode.shape_env): mode.shape_env for mode in modes}.values():
            if symbols is not None:
                symbols.tracked_fakes = None
                symbols.fake_tensor_cache.clear()
                for kept in vars(type(symbols)).values():
                    if hasattr(kept, "cache_clear"):
                        kept.cache_clear()
        FakeTensorMode.cache_clear()
