"""The dense part of a model as machine code, compiled by torch's AOTInductor at the export.

A request of one row spends most of its time between the layers, in Python and in torch's dispatch.
Compiled code has neither. It gains nothing on many rows, where the matrix products take the time
and torch picks the faster library for them.

The code is made for the processor and the torch of the exporting machine, and runs on no others. A
C++ compiler is needed at the export alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve.program import Program
from rayrec.storage import one_line

# Beyond, the uncompiled layers are as fast, or faster.
MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Torch version and processor that compiled code runs on.

    Attributes:
        torch: version of torch, such as "2.13.0+cpu".
        processor: instruction set extensions that the compiler may have used, in Linux's names.
    """

    torch: str
    processor: tuple[str, ...]

    @classmethod
    def here(cls) -> Target:
        """Return the target of this machine."""
        return cls(torch=torch.__version__, processor=_extensions())

    def misfit(self) -> str:
        """Explain in a clause why code for this target does not run here, or return ""."""
        own = Target.here()
        if self.torch != own.torch:
            return f"it was compiled for torch {self.torch}, and this is torch {own.torch}"
        missing = sorted(set(self.processor) - set(own.processor))
        if missing:
            return f"this processor lacks {missing[0]!r}, for which it was compiled"
        return ""


@cache
def _extensions() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(value.split()))
    return ()


def check_compiler() -> None:
    """Check that there is a C++ compiler, before anything is exported.

    Raises:
        ConfigError: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "the dense part cannot be compiled here: there is no C++ compiler. Install g++, or "
            "name another by the variable CXX, or export without compiling."
        ) from None


def compile_program(program: Path, out: Path) -> None:
    """Compile an exported dense part.

    Args:
        program: the file that `torch.export` saved.
        out: file to write.
    Raises:
        ArtifactError: torch or the compiler cannot compile it.
        OSError: the file system refuses.
    """
    from torch._inductor import aoti_compile_and_package, config
    from torch._inductor.utils import fresh_cache

    # The number of threads is that of the process which serves. Without workers of the compiler's
    # own, and without its cache, the export leaves nothing behind.
    settings = {"cpp.dynamic_threads": True, "compile_threads": 1}
    written = io.BytesIO()
    try:
        with fresh_cache(), config.patch(settings):
            loaded = torch.export.load(program)
            # not into the file: on a full disk torch's writer ends the process
            aoti_compile_and_package(loaded, package_path=written)
        trouble = _difference(
            loaded.module(), load_compiled(written.getvalue(), out), loaded.example_inputs[0]
        )
    # Inductor has no error class of its own for what it does not know how to compile.
    except Exception as error:
        raise ArtifactError(
            f"the dense part cannot be compiled: {type(error).__name__}: {one_line(error)[:300]}. "
            "Export without compiling."
        ) from error
    if trouble:
        raise ArtifactError(f"the dense part is compiled wrongly: {trouble}. Export without.")
    out.write_bytes(written.getbuffer())


@torch.inference_mode()
def _difference(program: Program, compiled: Program, example: Sequence[Tensor]) -> str:
    """Return a clause about the first difference of compiled code from the program, or ""."""
    draw = torch.Generator().manual_seed(0)  # the caller's random numbers stay where they are
    for rows in (1, 3, MOST_ROWS):
        inputs = [torch.randn(rows, given.shape[1], generator=draw) for given in example]
        for ours, theirs in zip(compiled(*inputs), program(*inputs), strict=True):
            if not torch.allclose(ours, theirs, 1e-4, 1e-5):
                most = (ours - theirs).abs().max().item()
                return f"of {rows} rows an output is off by {most:.2g}"
    return ""


def load_compiled(content: bytes, where: Path) -> Program:
    """Load what `compile_program` wrote, on a machine that it fits.

    Args:
        content: bytes of the file.
        where: path of the file, for messages.

    Raises:
        ArtifactError: the code cannot be loaded.
    """
    from torch._inductor import aoti_load_package

    try:
        package = aoti_load_package(io.BytesIO(content))
    except (RuntimeError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{where} cannot be loaded: {one_line(error)}. Export the checkpoint again, on this "
            "machine, or without compiling."
        ) from error

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(cast("list[Tensor]", package(*inputs)))

    return run
