"""What torch keeps of an export when the program is gone, and how it is dropped.

The sizes of a traced tensor are symbols, which C++ holds where no garbage collection sees them, so
the table of all symbols of an export lives for ever, and so do the sources of its graphs. That is
some 0.2 MB of a small model, and a run that publishes exports a model with every base. None of this
is torch's interface: where another torch keeps it elsewhere, nothing is dropped.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


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
    """Drop the symbols of an exported program, which is not traced any more."""
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
